#!/usr/bin/env bash
# Runs the tests marked gpu on PyTorch's CUDA build without a GPU: ../shared/fakecuda stands in for the driver.
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
fakecuda=$(cd "$here/../shared/fakecuda" && pwd)
torch=${1:-2.13.0}
export FAKECUDA_HOME=${FAKECUDA_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/fakecuda-$torch}
export FAKECUDA_HOST_GIB=16 OMP_NUM_THREADS=1
unset VIRTUAL_ENV # IPython would import the active environment's packages, its PyTorch too

# The stubs' set-up writes beside its sources, which may be read-only here.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$fakecuda/." "$work"

if [ ! -e "$FAKECUDA_HOME/ready" ]; then
  sh "$work/setup.sh" "$torch"
  touch "$FAKECUDA_HOME/ready"
fi
# --no-deps: what requires torch would bring gigabytes of real CUDA libraries, which torch prefers to the stubs.
"$FAKECUDA_HOME/venv/bin/pip" install -q --no-deps \
  platformdirs ipython traitlets decorator jedi parso matplotlib-inline prompt-toolkit wcwidth pygments stack-data executing \
  asttokens pure-eval pexpect ptyprocess ipython-pygments-lexers comm ipywidgets jupyterlab-widgets widgetsnbextension \
  matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing python-dateutil six \
  pytest pluggy iniconfig hypothesis sortedcontainers attrs
"$FAKECUDA_HOME/venv/bin/pip" install -q --no-deps -e "$here"
cd "$here"
# One process a file: what a failed cell leaves on the device is that file's own.
for file in tests/gpu/test_*.py; do
  "$work/fakecuda" run --gpu rtx3060 --ndev 2 -- python -m pytest -q -m gpu "$file"
done

# Triton goes where notebooks of compiled code alone see it: beside it, every explanation rehearses compiling.
"$FAKECUDA_HOME/venv/bin/pip" install -q --no-deps --target "$work/triton" triton==3.7.1
PYTHONPATH="$work/triton" TORCHINDUCTOR_COMPILE_THREADS=1 "$work/fakecuda" run --gpu rtx3060 -- \
  python -m pytest -q -m gpu tests/gpu/test_closed_loop.py -k compiled

# torchvision can be imported beside a CUDA build only. It goes where the tests above do not see it.
"$FAKECUDA_HOME/venv/bin/pip" install -q --no-deps --target "$work/site-packages" timm==1.0.31 torchvision==0.28.0
PYTHONPATH="$work/site-packages" "$work/fakecuda" run --gpu a100-80gb -- \
  python -m pytest -q --slow tests/truth/test_libraries_agreement.py -k "timm or torchvision"
