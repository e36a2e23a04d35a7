"""Jinja2 templates of sbatch scripts."""
