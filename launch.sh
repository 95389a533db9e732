#!/usr/bin/env bash
# Sets this machine up, once, and runs a script:
#
#   bash launch.sh                        train_gpt.py with its defaults
#   bash launch.sh SCRIPT ARGS...         any script of this checkout; ARGS arrive exactly as typed
#   bash launch.sh test [PYTEST ARGS...]  the tests
#   TPU=NAME bash launch.sh SCRIPT ARGS   on all workers of a TPU slice; see launch/slice.sh. Here all the same: --plan,
#                                         --help, the scripts of data/
#
# Setting up makes .venv beside this file, with the versions of requirements.txt. Later launches find it and start at
# once. PYTHON=/path/to/python3.12 chooses the Python, UV=no installs by pip alone. .venv may be deleted at any time.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
venv=${NANO_VENV:-$here/.venv} # slice.sh has one for all checkouts of a worker
py=$venv/bin/python
stamp=$venv/launch.stamp # where .venv belongs and what it holds in full; empty while that is being installed
version='import sys; print("%d.%d" % sys.version_info[:2])'

say() { printf 'launch.sh: %s\n' "$1" >&2; }
die() { printf 'error: %s\n' "$1" >&2; exit "${2-1}"; } # 2: a mistyped command, as the Python scripts have it
# Those meant to be run; the others, such as data/bpe.py, are only imported.
scripts() { (cd "$here" && grep -ls "^if __name__ == '__main__':" ./*.py data/*.py | sed -z 's|\./||g; s/\n/, /g'); }

need=(requirements.txt)
case ${1-} in
-h | --help)
  sed -sn '2,/^[^#]/s/^# \{0,1\}//p' "$here/launch.sh" "$here/launch/slice.sh"
  exit ;;
--create | --delete | --attach | --status | --stop | --logs | --ssh | --keep-alive)
  exec bash "$here/launch/slice.sh" "$@" ;;
-*) die "the script comes first, its options after it: bash launch.sh train_gpt.py $1 ..." 2 ;;
setup) ;; # only sets up; for slice.sh
test) need+=(tests/requirements.txt) ;;
*)
  script=$here/${1:-train_gpt.py}
  [ -f "$script" ] || die "no script '${1:-train_gpt.py}'; there are: $(scripts)test" 2
  afar=${TPU-} # what asks for no chips runs here, also where TPU=... is exported
  case ${1-} in data/* | ./data/*) afar= ;; esac
  for arg in "${@:2}"; do case $arg in --plan | --plan=* | -h | --help) afar= ;; esac; done
  [ -z "$afar" ] || { [ $# -gt 0 ] || set -- train_gpt.py; exec bash "$here/launch/slice.sh" "$@"; }
  ;;
esac

worker=${TPU_WORKER_HOSTNAMES-} # whether this is a worker of a slice
for tpu in /dev/accel* /dev/vfio/[0-9]*; do [ ! -e "$tpu" ] || worker+=tpu; done
export HOME=${HOME:-~} # a startup script has none
if [ -n "$worker" ] && [ "$(id -u)" = 0 ]; then # a startup script again, or sudo
  owner=$(stat -c %U "$here")
  case $owner in root | UNKNOWN) ;; *) die "you are root, and $here is $owner's, who could then neither change what is \
made here nor stop the run: sudo -H -u $owner bash $(printf %q "$here/launch.sh") ..." ;; esac
fi

# The caller's own Python set-up must neither hide the pins nor send them elsewhere. uv trusts what pip trusts.
unset PYTHONHOME PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PYTHONPATH=$here PIP_USER=0 UV_SYSTEM_CERTS=1

place() { echo "${venv%/*}, Python $("$py" -Ic "$version" 2>&1)"; }
is_placed() { # false if .venv is unfinished, was moved, has lost its Python, or has another one than is asked for
  [ "$(head -n 1 "$stamp" 2>/dev/null)" = "$(place)" ] || return 1
  [ -z "${PYTHON-}" ] || [ "$("$PYTHON" -Ic "$version")" = "$("$py" -Ic "$version")" ]
}
hashes() { (cd "$here" && sha256sum "${need[@]}"); }
is_ready() { is_placed && ! grep -qvxFf "$stamp" <<<"$(hashes)"; }

# A Python fits if the pins have wheels for it and it brings libpython, to which torch_xla links (pytorch/xla#6372):
# Debian packages that apart, and conda's and uv's lie where only works(), below, makes them found.
fits='
import ctypes, os, sys
v = "%d.%d" % sys.version_info[:2]
if v not in ("3.11", "3.12", "3.13"):
    sys.exit("is Python " + v)
if not os.path.exists(sys.base_prefix + "/lib/libpython" + v + ".so.1.0"):
    try:
        ctypes.CDLL("libpython" + v + ".so.1.0")
    except OSError:
        sys.exit("lacks its library; Debian, Ubuntu: sudo apt-get install libpython" + v)
print(sys.executable)'
find_python() { # sets python to the first that fits, or why to what is wrong with each
  local try found
  why=
  for try in "$@"; do
    command -v "$try" >/dev/null || continue
    if found=$("$try" -Ic "$fits" 2>&1); then python=$found; return; fi
    why+=$'\n'"  $try ${found##*$'\n'}"
  done
  return 1
}
find_uv() { # sets uv to the machine's own, or to one that the pip of Python $1 puts into .venv
  [ "${UV-}" != no ] || return 1
  uv=$(command -v "${UV:-uv}") || uv=$venv/uv/bin/uv
  [ -x "$uv" ] || "$1" -m pip install -q --target "$venv/uv" uv==0.13.9 2>/dev/null
}

make_venv() {
  say "making $venv: once, some minutes, up to 9 GB"
  mkdir "$venv" && : >"$stamp" || return
  if [ -n "${PYTHON-}" ]; then
    find_python "$PYTHON" || die "PYTHON=$PYTHON does not fit; Python 3.11, 3.12 or 3.13 is needed$why"
  elif ! find_python python3.13 python3.12 python3.11 python3 \
    "${PYENV_ROOT:-${HOME-}/.pyenv}"/versions/3.1[123].*/bin/python3 \
    "${XDG_DATA_HOME:-${HOME-}/.local/share}"/uv/python/cpython-3.1[123].*/bin/python3; then # Ubuntu 22.04: only 3.10
    say "no Python here fits, so uv is asked for 3.12$why"
    { find_uv python3 && "$uv" python install 3.12 && find_python "$("$uv" python find --system 3.12)"; } ||
      die 'Python 3.11, 3.12 or 3.13 is needed (jax 0.7.1 has no wheel for others). One of these brings it:
  pip install uv       (launch.sh then fetches a Python with it)
  sudo add-apt-repository ppa:deadsnakes/ppa && sudo apt-get install python3.12-venv libpython3.12     (Ubuntu 22.04)
  PYTHON=/path/to/python3.12 bash launch.sh ...       (one that is elsewhere)'
  fi
  if "$python" -Ic 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$venv"
  else # Debian and Ubuntu package it apart
    find_uv "$python" || die "$python cannot make a venv: sudo apt-get install python$("$python" -Ic "$version")-venv"
    "$uv" venv -q --seed --allow-existing --python "$python" "$venv"
  fi
}

works() { # torch_xla imports; it looks for libpython beside itself too
  say 'checking that torch_xla imports, which takes a while the first time'
  PJRT_DEVICE=CPU "$py" -Ic '
import os, sys, sysconfig
name = "libpython%d.%d.so.1.0" % sys.version_info[:2]
theirs, folder = f"{sys.base_prefix}/lib/{name}", sysconfig.get_path("platlib") + "/torch_xla/lib"
if os.path.exists(theirs) and not os.path.lexists(f"{folder}/{name}"):
    os.makedirs(folder, exist_ok=True)
    os.symlink(theirs, f"{folder}/{name}")
import torch_xla'
}

install() { # by uv, which is quick and can leave CUDA out; by pip where uv reaches nothing (it reads no pip.conf)
  local files=("${need[@]/#/-r}") kinds=('') kind silent=
  cd "$here"
  # Without a GPU, PyTorch's own CPU build saves a download of 3 GB; its index may be out of reach, so uv first tries.
  [ -e /dev/nvidiactl ] || kinds=(--torch-backend=cpu '')
  if find_uv "$py"; then
    for kind in "${kinds[@]}"; do
      set -- pip install ${kind:+"$kind"} --python "$py" "${files[@]}"
      UV_HTTP_TIMEOUT=10 timeout 90 "$uv" "$@" --dry-run --no-deps &>/dev/null || { silent=${kind:-all}; continue; }
      [ -z "$silent" ] || say "PyTorch's own index of CPU builds does not answer (or this uv is older than 0.7.14), so \
the large CUDA build is taken, which works as well"
      "$uv" "$@" --compile-bytecode || return # or each start compiles it where PYTHONDONTWRITEBYTECODE is set
      works && return
    done
    [ "$silent" != all ] || say 'uv reaches no package index, so pip installs, which may be set up for another one'
  fi
  "$py" -m pip install --no-input --disable-pip-version-check "${files[@]}" && works
}

set_up() {
  local again="see above; it needs the network and 9 GB of disk. Start again when that is mended: it begins anew"
  [ "$(uname -sm)" = 'Linux x86_64' ] || die "torch_xla 2.9.0 is built for Linux on x86-64 only; this is $(uname -sm)"
  # A lock on this file (nothing is written), or beside a shared .venv; a pip that outlives this shell holds it too.
  if [ "$venv" = "$here/.venv" ]; then exec 9>>"$here/launch.sh"; else exec 9>>"$venv.lock"; fi
  flock -n 9 || { say "waiting for another launch, which is making $venv"; flock 9; }
  if ! is_ready; then
    [ ! -e "$venv" ] || [ -e "$stamp" ] || die "$venv is not launch.sh's: move it away, or run its Python yourself"
    if ! is_placed; then
      [ ! -e "$venv" ] || { say "$venv is unfinished, was moved or has another Python"; mv "$venv" "$venv.old.$$"; }
      rm -rf "$venv".old.*
      make_venv || die "$venv could not be made, $again"
    fi
    : >"$stamp"
    (install) || die "the packages could not be installed, $again"
    { place; hashes; } >"$stamp.new" && mv "$stamp.new" "$stamp"
  fi
  exec 9>&- # the script must not hold the lock
}
is_ready || set_up
[ "${1-}" != setup ] || exit 0

if [ "${1-}" = test ]; then
  shift
  [ $# -gt 0 ] || set -- -q -m 'not slow' -n 2 --dist loadfile tests
  cd "$here"
  exec "$py" -m pytest "$@"
fi
[ $# -eq 0 ] || shift
device=cpu # for a train_*.py where there is neither a TPU nor a --device, and that does not only plan
hosts=${NANO_ID-} # whether launch/host.py runs it: started from afar, or a training on a slice that may have more hosts
case ${script##*/} in train_*) hosts+=$worker ;; *) device= ;; esac
previous=
for arg in "$@"; do
  case $arg in --device | --device=* | --plan | --plan=*) device= ;; esac
  case $arg in --plan | --plan=* | --export | --export=* | -h | --help | --device=cpu) hosts=${NANO_ID-} ;; esac
  [ "$previous $arg" != '--device cpu' ] || hosts=${NANO_ID-}
  previous=$arg
done
if [ -n "$device" ] && [ -z "$hosts$worker" ]; then # a worker never falls back to its CPU
  say 'no TPU here, so it runs with --device cpu'
  set -- --device cpu "$@"
  # XLA allocates its buffers anew for each step; in pages of 2 MB that is 10 to 25% quicker (glibc 2.35 and newer).
  export GLIBC_TUNABLES=${GLIBC_TUNABLES-glibc.malloc.hugetlb=1}
fi
[ -z "$hosts" ] || exec "$py" -P -m launch.host "$script" "$@"
exec "$py" "$script" "$@"
