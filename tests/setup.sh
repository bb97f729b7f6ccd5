#!/usr/bin/env bash
# Makes .venv from requirements.lock and installs this tree into it. As root on Debian or Ubuntu it first installs what the
# controller lacks; elsewhere it says what to install. Run again it does nothing, in well under a second.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
stamp=$venv/.locked

sum=$(cat requirements.lock pyproject.toml tests/setup.sh | sha256sum)
if [[ -x $venv/bin/ansible-playbook && -f $stamp && $(<"$stamp") == "$sum" ]]; then
  exit 0
fi

need=()
python=
for candidate in python3 python3.13 python3.12 python3.11; do
  if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
[[ -n $python ]] || need+=(python3-venv)
command -v ssh >/dev/null || need+=(openssh-client)
command -v git >/dev/null || need+=(git)
if ((${#need[@]})); then
  if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "setup: installing ${need[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${need[@]}" >/dev/null
    python=${python:-python3}
  else
    echo "setup: missing ${need[*]}; found no Python 3.11 or newer with venv, or no ssh or git." >&2
    echo "setup: install them (Debian, Ubuntu: apt-get install ${need[*]}) and run make again." >&2
    exit 1
  fi
fi

echo "setup: $("$python" --version) into $venv, from requirements.lock"
[[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
# Hashes make pip refuse anything but what was locked; the editable install then needs nothing from outside.
"$venv/bin/pip" install -qq --disable-pip-version-check --no-compile --require-hashes -r requirements.lock
"$venv/bin/pip" install -qq --disable-pip-version-check --no-compile --no-deps --no-build-isolation --editable .
echo "$sum" >"$stamp"
echo "setup: done in ${SECONDS} s"
