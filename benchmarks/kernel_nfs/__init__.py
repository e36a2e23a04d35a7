"""The kernel's own NFS client under the product: machines, primitives, runs."""
