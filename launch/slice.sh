#!/usr/bin/env bash
# A TPU slice, from a laptop; launch.sh hands over to this. Only bash and gcloud; host.py, runs.py: a worker's side.
#
#   bash launch.sh --create v5e-64 [--spot]              asks for a slice as a queued resource, and waits
#   TPU=NAME ZONE=... bash launch.sh SCRIPT ARGS...      runs a script on all workers and follows it; Ctrl-C detaches
#   bash launch.sh --attach                              follows the run that is alive, else shows the newest
#   bash launch.sh --status                              a line for each worker
#   bash launch.sh --stop                                ends the run, after a checkpoint
#   bash launch.sh --logs                                fetches all logs to out/logs
#   bash launch.sh --ssh 'COMMAND'                       runs a command on all workers
#   bash launch.sh --keep-alive v5e-64 [--spot] SCRIPT ARGS...   and creates the slice again when it was preempted
#   bash launch.sh --delete                              deletes the slice
#
# Exit code: the script's; 1 if this side failed, 2 for a mistyped command or a start that was refused, 75 if a host was
# lost, 143 after --stop. TRIES=3: after so many failures of the script in a row, each within ten minutes, --keep-alive
# gives up.
#
# TPU=NAME says which slice (--create: its type, if it is not set), ZONE= and PROJECT= where, if gcloud's configuration
# does not, RUN=NAME which run (else the last part of --out), RUNTIME= another software version of the TPU VM. What goes
# along from here: WANDB_API_KEY, HF_TOKEN, NANO_PORT, NANO_JOIN_S.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
where=(${ZONE:+"--zone=$ZONE"} ${PROJECT:+"--project=$PROJECT"})
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
nap=${NANO_NAP:-10} # seconds between two tries or looks; tests have less time
n=0                 # workers of the slice
: >"$tmp/own"

own() { printf '%s' "$1" >"$tmp/own"; } # how a run ended for this side: a script may end with any exit code
say() { printf 'slice.sh: %s\n' "$1" >&2; }
die() { printf 'error: %s\n' "$1" >&2; exit "${2-1}"; }
[ "${BASH_VERSINFO[0]}" -ge 5 ] || # as on macOS, whose tar and sed differ as well
  die 'this wants bash 5 and the GNU tools, as Linux has them: take Cloud Shell (https://shell.cloud.google.com)'
command -v gcloud >/dev/null || die 'there is no gcloud here: https://cloud.google.com/sdk/docs/install, then
  gcloud auth login; gcloud config set project PROJECT'

advice() { # on what gcloud said, in file $1
  cat "$1" >&2
  case $(<"$1") in
  *[Qq]uota* | *RESOURCE_EXHAUSTED*) say "no quota or capacity for this: https://cloud.google.com/tpu/docs/quota; spot \
chips have a quota of their own (--spot), and other zones may have room" ;;
  *[Bb]illing*) say 'link the project to a billing account: https://console.cloud.google.com/billing/projects' ;;
  *SERVICE_DISABLED* | *"has not been used in project"*) say 'run: gcloud services enable tpu.googleapis.com' ;;
  *PERMISSION_DENIED* | *"does not have permission"*) say "your account (gcloud auth list) needs the role TPU Admin \
(roles/tpu.admin) in this project (PROJECT=...)" ;;
  *ALREADY_EXISTS* | *"already exists"*) say "there is a slice ${TPU-} already: use it, or bash launch.sh --delete" ;;
  *"auth login"* | *credentials* | *[Rr]eauthentication*) say 'run: gcloud auth login' ;;
  *"ccelerator type"*"not found"*) say "no such type in this zone: gcloud compute tpus accelerator-types list" ;;
  *"property [project]"* | *"[core/project]"*) say 'say which: PROJECT=..., or gcloud config set project PROJECT' ;;
  *"to reach the server"* | *"ame resolution"* | *"Failed to resolve"* | *"Max retries"*) say "Google does not \
answer: is this machine online? Then try again" ;;
  *NOT_FOUND* | *"not found"*) say "there is no slice ${TPU-} in this zone and project: look with gcloud compute tpus \
queued-resources list, or make it with bash launch.sh --create TYPE" ;;
  *--zone* | *compute/zone*) say 'say where: ZONE=us-east5-b, or gcloud config set compute/zone us-east5-b' ;;
  esac
}
quietly() { gcloud compute tpus "$@" "${where[@]}" </dev/null 2>"$tmp/said"; } # it must not wait for an unseen answer
ask() { quietly "$@" || { advice "$tmp/said"; return 1; }; } # with advice when it fails
need_name() { # a name as Google has them: others would be taken for a flag, or for a folder
  [ -n "${TPU-}" ] || die 'say which slice: TPU=NAME bash launch.sh ...' 2
  [[ $TPU =~ ^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$ ]] ||
    die "TPU=$TPU is no name: lower-case letters, digits and -, at most 63, a letter first" 2
}

on() { # on I COMMAND: runs it on worker I; stdin is sent along. One call for each worker: they cannot share a stdin
  gcloud compute tpus tpu-vm ssh "$TPU" "${where[@]}" --worker="$1" --ssh-flag='-o ServerAliveInterval=15' \
    --command="$2"
}
sent() { # sent I FUNCTION PROGRAM: FUNCTION's output is the stdin of PROGRAM on worker I
  # gcloud repeats a command whose connection was lost, with what is left of stdin: it is run only from its first line.
  { echo '#nano' && "$2"; } | on "$1" "IFS= read -r first && [ \"\$first\" = '#nano' ] && exec $3"
}
# What a worker says of itself begins with @, and all text (of pip, of a script) with |; the rest is ssh's.
text() { sed -n 's/^|//p' "$tmp/out.$1"; }
confirmed() { # sent, until the worker itself says that it is done: gcloud's exit code does not tell
  local i=$1 try said
  for try in 1 2 3 4 5; do
    sent "$i" "$2" "$3" >"$tmp/out.$i" 2>"$tmp/err.$i" || true
    said=$(sed -n 's/^@ok \([0-9]*\)$/\1/p' "$tmp/out.$i")
    [ -z "$said" ] || return "$said"
    ! grep -q '^@failed$' "$tmp/out.$i" || return 1
    [ "$try" = 5 ] || sleep "$nap"
  done
  echo 'no answer after 5 tries' >>"$tmp/err.$i"
  return 99
}
# Each gcloud takes 100 MB of the laptop.
room() { while [ "$(jobs -rp | wc -l)" -ge "${NANO_AT_ONCE:-32}" ]; do sleep .2; done; }
all() { # all FUNCTION COMMAND: confirmed, on all workers at once; sets bad to those that failed
  local i pids=()
  for ((i = 0; i < n; i++)); do
    room
    confirmed "$i" "$@" & pids[i]=$!
    # The first call of a new key writes it to the project's or the slice's metadata, and several at once would race.
    [ "$i" -gt 0 ] || [ -n "${keyed-}" ] || { wait "${pids[0]}" || true; keyed=yes; }
  done
  bad=()
  for ((i = 0; i < n; i++)); do wait "${pids[i]}" || bad+=("$i"); done
  for i in "${bad[@]}"; do
    say "worker $i failed: $({ text "$i" | tail -n 3; tail -n 3 "$tmp/err.$i"; } 2>/dev/null | tr '\n' ' ')"
  done
  [ ${#bad[@]} -eq 0 ]
}
runs() { cat "$root/launch/runs.py"; } # is itself what the worker's Python reads

absent() { case $(<"$tmp/said") in *NOT_FOUND* | *"not found"*) ;; *) return 1 ;; esac; } # whether gcloud said so
look() { # sets n; fails, and says why, if the slice is not usable
  local found state
  if ! found=$(quietly tpu-vm describe "$TPU" --format='value(state,networkEndpoints.len())'); then
    cp "$tmp/said" "$tmp/why"
    if absent && state=$(quietly queued-resources describe "$TPU" --format='value(state.state)'); then
      say "slice $TPU is not there: its request is $state. bash launch.sh --create TYPE waits on, --delete ends it"
    else
      advice "$tmp/why"
    fi
    return 1
  fi
  read -r state n <<<"$found"
  [ "$state" = READY ] || { say "slice $TPU is $state"; return 1; }
}
slice_state() { # sets state to up (and n), coming, gone (Google took it), none, or unknown (as without a network)
  local found request
  state=unknown
  if ! request=$(quietly queued-resources describe "$TPU" --format='value(state.state)'); then
    absent || return 0
    request=none # none yet, or made by another command
  fi
  word=$request
  case $request in
  ACTIVE | none) ;;
  SUSPENDED | FAILED) state=gone; return ;;
  *) state=coming; return ;;
  esac
  if found=$(quietly tpu-vm describe "$TPU" --format='value(state,networkEndpoints.len())'); then
    read -r word n <<<"$found"
    case $word in READY) state=up ;; PREEMPTED | TERMINATED | STOPPED) state=gone ;; *) state=coming ;; esac
  elif absent; then # the request tells soon what became of its node
    if [ "$request" = none ]; then state=none; else state=coming word='without a node'; fi
  fi
}

# ---- A slice ----

accelerator() { # accelerator TYPE: sets kind, as Google has it, and runtime
  kind=$1
  case $kind in
  v5e-* | v5litepod-*) kind=v5litepod-${kind##*-} runtime=v2-alpha-tpuv5-lite ;;
  v6e-*) runtime=v2-alpha-tpuv6e ;;
  v5p-*) runtime=v2-alpha-tpuv5 ;;
  v4-*) runtime=tpu-ubuntu2204-base ;;
  *) die "no type '$1': such as v5e-64, v6e-16, v5p-128 or v4-32 (python train_gpt.py --plan lists them)" 2 ;;
  esac
}
create() { # create TYPE: returns when it can be used
  local state said='' began=$SECONDS
  accelerator "$1"
  if ! quietly queued-resources create "$TPU" --node-id="$TPU" --accelerator-type="$kind" \
    --runtime-version="${RUNTIME:-$runtime}" ${spot:+--spot} --async >/dev/null; then
    cp "$tmp/said" "$tmp/why"
    case $(<"$tmp/why") in *ALREADY_EXISTS* | *"already exists"*) slice_state ;; *) state= ;; esac
    [ "$state" = coming ] || { advice "$tmp/why"; return 1; }
    say "slice $TPU is asked for already: waiting for that request, whatever its type"
  fi
  trap 'say "the request for slice $TPU stays, and costs once it is granted: the same command again waits on, bash \
launch.sh --delete ends it"; exit 130' INT
  while :; do
    state=$(ask queued-resources describe "$TPU" --format='value(state.state)') || state='not to be seen just now'
    [ "$state" = "$said" ] || say "slice $TPU: $state, after $(((SECONDS - began) / 60)) min"
    said=$state
    case $state in
    ACTIVE) trap - INT; return ;;
    FAILED | SUSPENDED)
      trap - INT
      ask queued-resources describe "$TPU" --format='json(state)' >&2 || true
      say "it will not come: bash launch.sh --delete, and try another zone, type, or --spot"
      return 1 ;;
    esac
    sleep "$nap"
  done
}
delete() {
  if quietly queued-resources describe "$TPU" --format='value(state.state)' >/dev/null; then
    ask queued-resources delete "$TPU" --force --quiet
  else # made by another command
    ask tpu-vm delete "$TPU" --quiet
  fi
}

# ---- A run ----

pack() { # the checkout as git would have it, edits included; sets revision
  local describe
  cd "$root"
  git ls-files -z --cached --others --exclude-standard | sort -zu |
    while IFS= read -r -d '' file; do [ ! -f "$file" ] || printf '%s\0' "$file"; done >"$tmp/files"
  describe=$(git describe --always --dirty 2>/dev/null || echo new)
  revision=${describe//[^A-Za-z0-9._-]/_}-$(xargs -0 sha256sum -- <"$tmp/files" | sha256sum | cut -c1-12)
  printf '%s\n' "$revision" >"$tmp/.revision"
  tar -czf "$tmp/checkout.tgz" --null -T "$tmp/files" --transform='s,^,./,S' -C "$tmp" --add-file=.revision ||
    die "$root could not be packed into $tmp, see above (is the disk full, or may a file not be read?)"
  cd - >/dev/null
  local size=$(($(stat -c %s "$tmp/checkout.tgz") >> 20))
  [ "$size" -lt 100 ] || say "packed, $root has $size MB: what the workers do not need belongs in .gitignore"
}
# What a worker's bash reads from stdin does nothing before its last line: a lost connection does nothing by halves.
send_setup() {
  printf 'revision=%q more=%q\n' "$revision" "$(case " ${command[*]}" in *[\ =]gs://*) echo gcsfs==2026.10.1 ;; esac)"
  cat <<'REMOTE'
main() {
  trap '' HUP
  mkdir -p ~/nano/checkouts && cd ~/nano/checkouts || return
  new=$(mktemp -d ./new.XXXXXX) || return
  tar -xzf - -C "$new" || { rm -rf "$new"; return 1; }
  mv -T "$new" "$revision" 2>/dev/null || rm -rf "$new" # it is there already
  [ -e "$revision/launch.sh" ] || return
  NANO_VENV=$HOME/nano/.venv NANO_ID='' TPU='' bash "$revision/launch.sh" setup || return
  [ -z "$more" ] || ../.venv/bin/python -c 'import gcsfs' 2>/dev/null ||
    ../.venv/bin/python -m pip install -q -c "$revision/requirements.txt" "$more"
}
set -o pipefail
if main 2>&1 | sed 's/^/|/'; then echo '@ok 0'; else echo '@failed'; fi; exit
REMOTE
  cat "$tmp/checkout.tgz"
}
send_start() {
  local name
  printf 'revision=%q run=%q id=%q args=(' "$revision" "$run" "$id"
  printf '%q ' "${command[@]}"
  printf ')\n'
  for name in WANDB_API_KEY HF_TOKEN NANO_PORT NANO_JOIN_S; do # to the process alone: in no file, no command line
    [ -z "${!name-}" ] || printf 'export %s=%q\n' "$name" "${!name}"
  done
  cat <<'REMOTE'
main() {
  trap '' HUP
  folder=$HOME/nano/runs/$run/$id
  mkdir -p "${folder%/*}" && cd ~/nano || return
  if said=$(mkdir "$folder" 2>&1); then # else this worker has the run already: it never starts twice
    NANO_VENV=$HOME/nano/.venv NANO_RUN=$run NANO_ID=$id NANO_DETACHED=yes TPU='' setsid nohup \
      bash "checkouts/$revision/launch.sh" "${args[@]}" </dev/null >"$folder/launch.txt" 2>&1 &
    echo $! >"$folder/pid"
  elif [ ! -d "$folder" ]; then
    echo "|$said"
    return 1
  fi
}
if main; then echo '@ok 0'; else echo '@failed'; fi; exit
REMOTE
}
clean() { # clean NAME: as name_of of facts.py
  local LC_ALL=C name
  name=${1//[^A-Za-z0-9._-]/_}
  printf '%s' "${name#"${name%%[^.-]*}"}"
}
name_run() { # the same name as facts.py's name_of gives
  local i
  out=''
  for ((i = 1; i <= $#; i++)); do
    case ${!i} in --out=*) out=${!i#--out=} ;; --out) i=$((i + 1)) && out=${!i-} ;; esac
  done
  out=${out%"${out##*[!/]}"} run=${RUN:-${out##*/}}
  [ -n "$run" ] || { run=${1##*/} && run=${run%.py}; }
  run=$(clean "$run") run=${run:-run}
}
start() { # the command on all workers
  name_run "${command[@]}"
  id=$(date +%Y%m%d-%H%M%S)-$RANDOM
  say "revision $revision to the $n workers of $TPU, and setting them up (the first time takes minutes)"
  all send_setup 'bash -s' || { own unstarted; return 1; }
  say "all $n workers have $revision: starting run $run ($id)"
  trap 'say "interrupted: some workers may have started; --stop ends them"; own detached; exit 130' INT
  all send_start 'bash -s' || { trap - INT; own unstarted; return 1; }
}
follow() { # follow RUN ID: worker 0's log to its end; returns the run's exit code
  local name=$1 id=$2 seen=0 tries=0 line code
  trap 'trap - INT; own detached; say "detached; the run goes on: --attach follows it again, --stop ends it"; exit 0' \
    INT
  while :; do
    code=
    while IFS= read -r line; do
      tries=0
      case $line in
      '|'*) printf '%s\n' "${line#|}" && seen=$((seen + 1)) ;;
      '@run '*) read -r _ name id <<<"$line" ;;
      '@stopped') own stopped ;;
      '@end '*) code=${line#@end } ;;
      esac
    done < <(sent 0 runs "python3 - follow '$name' '$id' $seen" 2>"$tmp/follow.err")
    [ -z "$code" ] || { trap - INT; return "$code"; }
    tries=$((tries + 1))
    [ "$tries" -lt 5 ] || { trap - INT; cat "$tmp/follow.err" >&2; own lost; return 1; }
    sleep "$nap"
    look || { trap - INT; own lost; return 1; }
  done
}
launch() { # to the end of the run
  look || { own lost; return 1; }
  pack
  start || return
  follow "$run" "$id"
}
over() { # over CODE: ends with it, unless there is more to say
  case $(<"$tmp/own") in
  lost) die "worker 0 of $TPU cannot be reached: --status tells more, --attach follows a run that is alive" ;;
  unstarted) die 'nothing was started on the workers that are named above; --stop ends what was' ;;
  esac
  exit "$1"
}
check() { # check SCRIPT ARGS...: what cannot work anywhere is refused before it costs
  git -C "$root" rev-parse --git-dir >/dev/null || die "git does not take $root for a checkout (see above), so what to \
copy is not known"
  [ -f "$root/$1" ] || die "no script '$1' in $root" 2
  [ -n "$(git -C "$root" ls-files --cached --others --exclude-standard -- "$1")" ] ||
    die "git ignores $1, so the workers would not get it: git add -f $1" 2
}

keep_alive() { # keep_alive TYPE SCRIPT ARGS...
  local type=$1 log quick=0 again=0 began code ended state word first='' lost='' begun='' seen='' said='' looks
  shift
  command=("$@")
  accelerator "$type"
  check "$@"
  name_run "$@"
  case $out in *://*) ;; *) say "note: without --out gs://... checkpoints are on the slice's own disks, which a \
preemption deletes: the run would then start from nothing" ;; esac
  mkdir -p "$root/out"
  log=$root/out/keep-alive-$TPU-$run.log
  note() { say "$1"; printf '%s %s\n' "$(date '+%F %T')" "$1" >>"$log"; }
  while :; do
    # A slice is deleted only when Google says that it is gone, and made only when Google says that there is none: the
    # laptop's own network fails too. One that a person has deleted is not rented again.
    slice_state
    case $state in
    up) ;;
    unknown | coming)
      if [ "$state" = coming ]; then seen=yes; else word="not to be seen just now: $(tail -n 1 "$tmp/said")"; fi
      [ "$word" = "$said" ] || say "slice $TPU is $word; waiting"
      said=$word
      sleep "$nap"
      continue ;;
    none | gone)
      [ "$state$seen" != noneyes ] || { note "somebody deleted slice $TPU: it is not made again"; return 1; }
      [ "$state" = none ] || { note "slice $TPU is $word: deleted"; delete || return; }
      create "$type" || { note 'the slice could not be created, see above'; return 1; }
      note "slice $TPU is created"
      lost='' seen=yes
      continue ;;
    esac
    seen=yes said=
    # The run may be alive, when this was started and ended before.
    if [ -z "$begun" ] && confirmed 0 runs "python3 - status '$run'" &&
      text 0 | grep -q "^$run [^ ]*: [a-z]*, pid "; then
      lost=yes
      note "run $run is alive: it is followed"
    fi
    began=$SECONDS code=0 begun=yes
    : >"$tmp/own"
    if [ -n "$lost" ]; then # out of sight for a while: the run may be alive
      (follow "$run" '') 2>&1 | tee -i "$tmp/last" || code=${PIPESTATUS[0]}
    else
      (launch) 2>&1 | tee -i "$tmp/last" || code=${PIPESTATUS[0]}
    fi
    lost='' ended=$(<"$tmp/own")
    case $ended in
    detached) note 'nobody watches any more; the same command goes on'; return "$code" ;;
    stopped) note "run $run was stopped"; return "$code" ;;
    '') [ "$code" != 0 ] || { note "run $run is complete, after $again repeats"; return 0; } ;;
    esac
    # A preemption ends a run in many ways, also by SIGTERM, and Google may tell of it minutes later.
    looks=1
    case $ended$code in 75 | 129 | 130 | 143 | unstarted*) looks=${NANO_LOOKS:-18} ;; esac
    while slice_state && looks=$((looks - 1)) && [ "$looks" -gt 0 ]; do
      case $state in up | unknown) sleep "$nap" ;; *) break ;; esac
    done
    case $state in
    up | unknown) ;;
    none) continue ;;
    *)
      again=$((again + 1)) quick=0
      note "preemption: the slice is gone, $word (exit code $code); repeat $again, from the newest checkpoint"
      continue ;;
    esac
    if [ "$ended" = lost ]; then
      lost=yes
      note "worker 0 cannot be reached; looking again"
      continue
    fi
    again=$((again + 1))
    if [ "$ended$code" = 75 ]; then # a lost host is not the program's fault
      note "run $run lost a host (exit code 75); repeat $again"
      all runs "python3 - stop '$run'" || true
      continue
    fi
    if [ $((SECONDS - began)) -lt "${QUICK_S:-600}" ]; then quick=$((quick + 1)); else quick=1 first=''; fi
    [ -n "$first" ] || first=$(grep -A60 'failed first\|nothing was started' "$tmp/last" || tail -n 20 "$tmp/last")
    note "run $run failed with exit code $code ($quick in a row); repeat $again"
    all runs "python3 - stop '$run'" || true # what is left of it, such as a stale lock
    if [ "$quick" -ge "${TRIES:-3}" ]; then
      note "given up after $quick quick failures; the first was: $first"
      return "$code"
    fi
  done
}

# ---- The command line ----

whole() { # whole NAME LEAST MOST: whether it is such a number, or not set
  local value=${!1-}
  [ -z "$value" ] || { [[ $value =~ ^[0-9]{1,6}$ ]] && ((10#$value >= $2 && 10#$value <= $3)); } ||
    die "$1=$value: give a whole number from $2 to $3, or leave it out" 2
}
whole NANO_PORT 1024 65535
whole NANO_JOIN_S 1 999999
take_type() { # take_type ARGS: sets type, spot, which may stand before or after it, and taken, how many words these are
  type='' taken=0
  while [ $# -gt 0 ]; do
    case $1 in
    --spot) spot=yes ;;
    -*) break ;;
    *) [ -z "$type" ] || break; type=$1 ;;
    esac
    taken=$((taken + 1))
    shift
  done
  [ -n "$type" ]
}
alone() { # what takes no more words
  [ $# -eq 1 ] || die "$1 takes no '$2': the slice is TPU=NAME, the run RUN=NAME, before bash launch.sh $1" 2
}

spot=
run=$(clean "${RUN-}") # '': the newest
case $1 in
--create)
  shift
  take_type "$@" || die 'which type? bash launch.sh --create v5e-64 [--spot]' 2
  [ $# -eq "$taken" ] || die "--create TYPE [--spot] takes no '${*:taken+1:1}'; the slice's name is TPU=NAME" 2
  TPU=${TPU:-$type}
  need_name
  create "$type"
  say "ready: TPU=$TPU ${ZONE:+ZONE=$ZONE }bash launch.sh SCRIPT ARGS...; it costs until bash launch.sh --delete" ;;
--delete) alone "$@"; need_name; delete ;;
--attach) alone "$@"; need_name; look || exit; code=0; follow "$run" '' || code=$?; over "$code" ;;
--status | --stop | --logs)
  alone "$@"; need_name; look || exit
  verb=${1#--} code=0
  [ "$verb" != logs ] || verb=log
  all runs "python3 - $verb '$run'" || code=1
  for ((i = 0; i < n; i++)); do
    if [ "$verb" = log ]; then
      mkdir -p "$root/out/logs/$TPU/${run:-newest}"
      text "$i" >"$root/out/logs/$TPU/${run:-newest}/worker_$i.txt"
    else
      text "$i" | sed "s/^/worker $i: /"
    fi
  done
  [ "$verb" != log ] || say "the logs are in $root/out/logs/$TPU/${run:-newest}"
  exit "$code" ;;
--ssh)
  need_name; look || exit
  [ $# -eq 2 ] || die "--ssh 'COMMAND', in quotes" 2
  pids=() code=0
  for ((i = 0; i < n; i++)); do
    room
    (on "$i" "$2" </dev/null 2>&1 | sed "s/^/worker $i: /") & pids[i]=$!
  done
  for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
  exit "$code" ;;
--keep-alive)
  need_name
  shift
  take_type "$@" || die '--keep-alive TYPE [--spot] SCRIPT ARGS...' 2
  shift "$taken"
  [ $# -gt 0 ] || die '--keep-alive TYPE [--spot] SCRIPT ARGS...' 2
  keep_alive "$type" "$@" ;;
-*) die "no option $1; bash launch.sh --help lists them" 2 ;;
*)
  need_name
  check "$@"
  command=("$@")
  code=0
  launch || code=$?
  over "$code" ;;
esac
