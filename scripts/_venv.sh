# Sourced by quickstart, test and check: the clone's virtual environment, made and kept up to date
# in one place. Nothing outside of .venv is written.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
VENV=$PWD/.venv
PIP_LOG=$VENV/install.log

say() { printf '==> %s\n' "$*" >&2; }
die() { printf '%s\n' "error: $1" "${@:2}" >&2; exit 1; }

# use_venv EXTRA...: put .venv first in PATH, with this clone and the named extras installed.
use_venv() {
    [[ -x $VENV/bin/python && -x $VENV/bin/pip ]] || make_venv
    export PATH=$VENV/bin:$PATH
    unset PYTHONHOME PYTHONPATH
    local extra
    for extra in "$@"; do
        install_extra "$extra"
    done
}

make_venv() {
    local python=${PYTHON:-python3}
    command -v "$python" >/dev/null ||
        die "there is no $python here." "On Debian: apt-get install python3 python3-venv"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$("$python" --version 2>&1) is too old: hpc_elastic needs 3.11 or newer." \
            "Name another one: PYTHON=python3.12 $0"
    if [[ -n ${CI:-} ]] && ((EUID == 0)) && ! "$python" -c 'import ensurepip' 2>/dev/null; then
        say "Installing python3-venv with apt-get"
        apt-get -qq update && apt-get -qq install -y python3-venv >/dev/null || true
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python has no venv module." "On Debian: apt-get install python3-venv"
    say "Making .venv with $("$python" --version)"
    "$python" -m venv --clear "$VENV" || die "could not make $VENV"
}

# Installs once for each content of all pyproject.toml and of constraints.txt.
install_extra() {
    local stamp=$VENV/.installed-$1 wanted
    wanted=$(cat pyproject.toml tools/*/pyproject.toml constraints.txt <(python --version) | sha256sum)
    [[ -e $stamp && $(<"$stamp") == "$wanted" ]] && return
    if ! python -c 'import torch' 2>/dev/null; then
        say "Installing torch ($(torch_build) build) into .venv"
        # shellcheck disable=SC2046  # no argument at all, or two
        quiet_pip $(torch_index) "$(torch_requirement)"
    fi
    say "Installing hpc_elastic[$1] into .venv"
    local names=() tools=() name
    case $1 in
    test | check | docs) names=(slurm_sandbox hpc_elastic_testing hpc_elastic_watch) ;;
    bench) names=(slurm_sandbox hpc_elastic_testing) ;;
    gpu) names=(slurm_sandbox simulated_gpu) ;;
    esac
    for name in "${names[@]}"; do
        tools+=(--editable "./tools/$name")
    done
    quiet_pip --editable ".[$1]" "${tools[@]}"
    printf '%s\n' "$wanted" >"$stamp"
}

# Without an NVIDIA driver, torch's CUDA packages are several GB for nothing.
torch_build() { [[ ${TORCH_BUILD:-} == CUDA || -e /proc/driver/nvidia/version ]] && echo CUDA || echo CPU; }

# TORCH_BUILD=CUDA is PyPI's own wheel: `==` would take a +cpu of another index for it.
torch_requirement() { [[ ${TORCH_BUILD:-} == CUDA ]] && sed -n 's/^torch==/torch===/p' constraints.txt || echo torch; }

torch_index() {
    local index=https://download.pytorch.org/whl/cpu
    [[ $(torch_build) == CPU ]] || return 0
    python -c "from urllib.request import urlopen; urlopen('$index/torch/', timeout=5)" \
        2>/dev/null && echo --extra-index-url "$index"
}

quiet_pip() {
    python -m pip install --disable-pip-version-check --constraint constraints.txt "$@" \
        </dev/null >"$PIP_LOG" 2>&1 && return
    tail -n 25 "$PIP_LOG" >&2
    die "pip could not install it (above; all of it in $PIP_LOG)." \
        "No network? A mirror is named by PIP_INDEX_URL, a folder of wheels by PIP_FIND_LINKS."
}
