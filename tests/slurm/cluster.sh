#!/bin/bash
# A real SLURM cluster of four nodes on this machine, for the tests: munged, MariaDB, slurmdbd,
# slurmctld and four slurmd. Debian 12, as root; no systemd, docker or cgroups needed.
#
#   tests/slurm/cluster.sh install          install missing packages where possible; always exits 0
#   tests/slurm/cluster.sh up               install, start, and wait until every node is idle
#   eval "$(tests/slurm/cluster.sh env)"    now sinfo, sbatch and the rest talk to it
#   tests/slurm/cluster.sh down             stop all of it; only logs stay
#
#   status             the pid of each daemon, and sinfo
#   exec NODE CMD...   run CMD on a node
#   crash NODE         power loss: its processes die and its link goes (mode netns only)
#   stop-slurmd NODE   kill only its slurmd; jobs on it run on
#   boot NODE          bring it back after either
#   stop-ctld, start-ctld   the controller, which keeps its queue
#   repair             start again whatever of this is down
#
# Options, after the verb:
#   --slot K           0 to 9: which of several clusters side by side (0; pytest takes 1 to 4)
#   --mode M           netns: each node has its own network, host name, processes and /dev/shm;
#                      ports: only its own slurmd. auto (the default): netns where that is allowed
#   --no-install       for up: fail where a package is missing
#
# Nodes node1 to node4: 4 CPUs, 16000 MB and 2 GPUs of type a100 each; features a100,ib on the first
# two and a100,eth on the others. Partitions gpu (default), cpu, debug (5 minutes, 2 nodes), spare
# (its jobs are cancelled when one of another partition needs the node).
# Accounts main (default) and alt. All nodes share the file system. Files: /var/tmp/allranks-slurm[-K].
set -u -o pipefail
PATH=$PATH:/usr/sbin:/sbin
SELF=$(realpath "$0")

NODES=4 GPUS=2 CPUS=4 MEMORY=16000
PACKAGES=(
  slurmctld slurmd slurmdbd slurm-client slurm-wlm-basic-plugins slurm-wlm-mysql-plugin
  mariadb-server munge iproute2 procps util-linux
)

say() { echo "cluster.sh: $*" >&2; }
die() {
  say "$*"
  exit 1
}
usage() {
  sed -n '2,/^set /p' "$SELF" | sed '$d; s/^# \{0,1\}//'
  exit 2
}

VERB=${1:-help}
[ $# = 0 ] || shift
SLOT=0 MODE=auto INSTALL=yes
while [ $# -gt 0 ]; do
  case $1 in
    --slot) SLOT=${2:-}; shift 2 || usage ;;
    --mode) MODE=${2:-}; shift 2 || usage ;;
    --no-install) INSTALL=no; shift ;;
    -*) usage ;;
    *) break ;;
  esac
done
[[ $SLOT =~ ^[0-9]$ && $MODE =~ ^(auto|netns|ports)$ ]] || usage

HOME_DIR=/var/tmp/allranks-slurm
[ "$SLOT" = 0 ] || HOME_DIR+=-$SLOT
RUN=$HOME_DIR/run LOG=$HOME_DIR/log CONF=$HOME_DIR/etc/slurm.conf
PORT=$((17800 + 200 * SLOT)) SUBNET=10.78.$SLOT BRIDGE=allranks$SLOT
DATABASE_PORT=$((PORT + 6)) CONTROLLER_PORT=$((PORT + 17)) SLURMD_PORT=$((PORT + 18))
ACCOUNTING_PORT=$((PORT + 19))
export SLURM_CONF=$CONF
# Daemons inherit nothing: neither the caller's variables nor, with them, the mark of its processes.
CLEAN=(env -i PATH="$PATH" LANG=C.UTF-8 SLURM_CONF="$CONF")

# ---------------------------------------------------------------- packages

missing_packages() {
  local installed
  installed=$(dpkg-query -Wf '${db:Status-Status} ${Package}\n' "${PACKAGES[@]}" 2>/dev/null)
  printf 'installed %s\n' "${PACKAGES[@]}" | grep -vxF "$installed" | cut -d' ' -f2
}

install_packages() ( # a subshell, for the trap
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    command -v slurmctld slurmd slurmdbd munged mariadbd ip unshare >/dev/null && return 0
    say "SLURM is not installed, and without apt-get it cannot be from here"
    return 1
  fi
  mapfile -t missing < <(missing_packages)
  [ ${#missing[@]} -gt 0 ] || return 0
  if [ "$INSTALL" = no ] || [ "$(id -u)" != 0 ]; then
    say "packages are missing: ${missing[*]}"
    say "  fix: run 'tests/slurm/cluster.sh install' as root"
    return 1
  fi
  say "installing ${missing[*]}"
  scrap=("$(mktemp)")
  trap 'rm -f "${scrap[@]}"' EXIT
  if [ ! -e /usr/sbin/policy-rc.d ]; then # or the packages would start daemons of their own
    scrap+=(/usr/sbin/policy-rc.d)
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
    chmod 755 /usr/sbin/policy-rc.d
  fi
  if ! { apt_get update && apt_get install "${missing[@]}"; } >"${scrap[0]}" 2>&1; then
    tail -n 5 "${scrap[0]}" >&2
    say "apt-get could not install SLURM"
    return 1
  fi
)

apt_get() {
  DEBIAN_FRONTEND=noninteractive apt-get -y --no-install-recommends \
    -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300 "$@" </dev/null
}

# ---------------------------------------------------------------- processes, always by pid

# RUN/NAME.process holds a pid and its start time, which tells a reused pid from ours.
start_time() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }
remember() { echo "$2 $(start_time "$2")" >"$RUN/$1.process"; }

pid_of() { # NAME: fails where it does not run
  local pid started
  read -r pid started 2>/dev/null <"$RUN/$1.process" || return 1
  [ -n "$started" ] && [ "$(start_time "$pid")" = "$started" ] && ! is_gone "$pid" && echo "$pid"
}

is_gone() { # PID: a zombie is gone too
  [ ! -e "/proc/$1" ] || [ "$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -c1)" = Z ]
}

stop() { # NAME [SIGNAL]: and KILL after 30 s
  local pid
  if pid=$(pid_of "$1"); then
    kill "-${2:-TERM}" "$pid" 2>/dev/null
    if ! await 30 "$1 to end" is_gone "$pid"; then
      kill -KILL "$pid" 2>/dev/null
      await 20 "$1 to end, though killed" is_gone "$pid"
    fi
  fi
  rm -f "$RUN/$1.process"
}

await() { # SECONDS WHAT CMD...: until CMD succeeds
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@" >/dev/null 2>&1; do
    if [ $SECONDS -ge $deadline ]; then
      say "waited in vain for $what"
      return 1
    fi
    sleep 0.05
  done
}

# ---------------------------------------------------------------- nodes

address() { # INDEX
  # In mode ports one address for all, or ranks would not find the first node's own.
  if [ "$MODE" = netns ]; then echo "$SUBNET.$1"; else echo 127.0.0.1; fi
}
link() { echo "${BRIDGE}n$1"; } # INDEX

index_of() { # NODE
  [[ ${1:-} =~ ^node([0-9]+)$ ]] && [ "${BASH_REMATCH[1]}" -ge 1 ] && [ "${BASH_REMATCH[1]}" -le "$NODES" ] ||
    die "no node is named '${1:-}'"
  echo "${BASH_REMATCH[1]}"
}

can_netns() { # what mode netns does, tried
  unshare -m -u -i -n -p --fork --mount-proc sh -c \
    'hostname x && mount -t tmpfs t /dev/shm && ip link add v0 type veth peer name v1' \
    >/dev/null 2>&1 || return 1
  ip link add "try$$" type bridge 2>/dev/null && ip link del "try$$"
}

in_node() { # INDEX CMD...
  local index=$1 pid
  shift
  if [ "$MODE" = netns ]; then
    pid=$(pid_of "init-node$index") || die "node$index is not up"
    nsenter -t "$pid" -m -u -i -n -p -r -- "$@" # -r: a caller in a chroot stays in it
  else
    "$@"
  fi
}

boot_init() { # INDEX: the node's namespaces, kept by a process that reaps orphans, and its link
  local index=$1 node=node$1 outer pid
  rm -f "$RUN/$node.ready"
  "${CLEAN[@]}" setsid unshare -m -u -i -n -p --fork --mount-proc --propagation private bash -c '
    set -e
    hostname "$1"
    mount --bind "$2/etc/hosts" /etc/hosts
    mount --bind "$2/etc/resolv.conf" /etc/resolv.conf
    mount -t sysfs sysfs /sys # or /sys/class/net would list the links of the host
    mount -t tmpfs -o mode=1777 tmpfs /dev/shm
    ip link set lo up
    touch "$2/run/$1.ready"
    trap "" HUP INT
    set +e
    while :; do sleep 86400 & wait $!; done' \
    "init-$node" "$node" "$HOME_DIR" </dev/null >"$LOG/init-$node.log" 2>&1 &
  outer=$!
  await 60 "the namespaces of $node" test -e "$RUN/$node.ready" || return 1
  pid=$(pgrep -P "$outer" | head -n 1)
  [ -n "$pid" ] || return 1
  remember "init-$node" "$pid"
  ip link del "$(link "$index")" 2>/dev/null
  ip link add "$(link "$index")" type veth peer name eth0 netns "$pid" &&
    ip link set "$(link "$index")" master "$BRIDGE" up &&
    nsenter -t "$pid" -n ip addr add "$(address "$index")/24" dev eth0 &&
    nsenter -t "$pid" -n ip link set eth0 up &&
    nsenter -t "$pid" -n ip route add default via "$SUBNET.254"
}

boot_slurmd() { # INDEX
  local index=$1 node=node$1 inner pid
  mkdir -p "$HOME_DIR/spool/$node"
  rm -f "$RUN/slurmd-$node.pid"
  in_node "$index" "${CLEAN[@]}" slurmd -N "$node" </dev/null >>"$LOG/slurmd-$node.log" 2>&1 &&
    await 60 "slurmd of $node" test -s "$RUN/slurmd-$node.pid" || return 1
  inner=$(cat "$RUN/slurmd-$node.pid")
  pid=$inner
  if [ "$MODE" = netns ]; then # the file has the pid that the node sees
    pid=$(pgrep --ns "$(pid_of "init-$node")" --nslist pid -x slurmd | while read -r pid; do
      [ "$(awk '/^NSpid/ {print $NF}' "/proc/$pid/status")" != "$inner" ] || echo "$pid"
    done)
  fi
  [ -n "$pid" ] && remember "slurmd-$node" "$pid"
}

boot() { # INDEX
  if [ "$MODE" = netns ] && ! pid_of "init-node$1" >/dev/null; then
    boot_init "$1" || die "node$1 did not boot: see $LOG"
  fi
  pid_of "slurmd-node$1" >/dev/null && return
  boot_slurmd "$1" || {
    tail -n 5 "$LOG/slurmd-node$1.log" >&2
    die "slurmd of node$1 did not start"
  }
}

crash() { # INDEX
  [ "$MODE" = netns ] || die "only in mode netns can a node crash"
  ip link del "$(link "$1")" 2>/dev/null # first, or the kernel would say goodbye to its peers
  stop "init-node$1" KILL
  rm -f "$RUN/slurmd-node$1.process"
}

# ---------------------------------------------------------------- configuration

controller_address() { if [ "$MODE" = netns ]; then echo "$SUBNET.254"; else echo 127.0.0.1; fi; }

write_files() {
  local index host
  host=$(hostname -s 2>/dev/null || hostname)
  {
    echo "127.0.0.1 localhost"
    echo "$(controller_address) $host"
    for ((index = 1; index <= NODES; index++)); do echo "$(address "$index") node$index"; done
  } >"$HOME_DIR/etc/hosts"
  : >"$HOME_DIR/etc/resolv.conf" # empty: nodes reach no name server, and waiting for one takes 10 s
  # SLURM 22.05 drops GPUs that have no file: each is a copy of /dev/null.
  for ((index = 0; index < GPUS; index++)); do
    mknod -m 666 "$HOME_DIR/dev/nvidia$index" c 1 3 2>/dev/null || : >"$HOME_DIR/dev/nvidia$index"
  done
  printf '%s\n' "AutoDetect=off" "Name=gpu Type=a100 File=$HOME_DIR/dev/nvidia[0-$((GPUS - 1))]" \
    >"$HOME_DIR/etc/gres.conf"
  # Named outright, the plugin for v1 touches nothing until it is used; else slurmd looks for
  # cgroups as it starts, and ends where there are none.
  echo "CgroupPlugin=cgroup/v1" >"$HOME_DIR/etc/cgroup.conf"
  slurm_conf "$host" >"$CONF"
  (umask 077 && slurmdbd_conf "$host" >"$HOME_DIR/etc/slurmdbd.conf") # slurmdbd insists
}

slurm_conf() { # HOST
  cat <<END
ClusterName=allranks
SlurmctldHost=$1($(controller_address))
SlurmctldPort=$CONTROLLER_PORT
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$HOME_DIR/state
SlurmdSpoolDir=$HOME_DIR/spool/%n
SlurmctldPidFile=$RUN/slurmctld.pid
SlurmdPidFile=$RUN/slurmd-%n.pid
SlurmctldLogFile=$LOG/slurmctld.log
SlurmdLogFile=$LOG/slurmd-%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its credential has expired: 120 s by default.
AuthInfo=socket=$RUN/munge.socket,cred_expire=10
# What works without cgroups.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
# Without cgroups a step that takes more memory than it asked for is ended by SLURM itself.
JobAcctGatherParams=OverMemoryKill
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
PropagateResourceLimits=NONE
# Nodes have what is written below, whatever this machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=$((MEMORY / CPUS))
PriorityType=priority/multifactor
# Only partition spare is below the others.
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,bf_resolution=10,bf_continue,sched_interval=5,batch_sched_delay=0,sched_min_interval=10000
# Everything as soon as possible: tests wait for it.
SlurmdTimeout=10
SlurmctldTimeout=30
MessageTimeout=10
KillWait=5
CompleteWait=0
InactiveLimit=0
MinJobAge=600
JobRequeue=1
ReturnToService=2
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort=$ACCOUNTING_PORT
AccountingStoragePass=$RUN/munge.socket
AccountingStorageEnforce=associations,limits,qos
AccountingStoreFlags=job_comment,job_env,job_script
AccountingStorageTRES=gres/gpu,gres/gpu:a100
GresTypes=gpu
NodeName=DEFAULT CPUs=$CPUS Boards=1 SocketsPerBoard=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=$MEMORY Gres=gpu:a100:$GPUS State=UNKNOWN
END
  local index features where
  for ((index = 1; index <= NODES; index++)); do
    if [ "$index" -le $((NODES / 2)) ]; then features=a100,ib; else features=a100,eth; fi
    if [ "$MODE" = netns ]; then
      where="NodeAddr=$(address "$index") Port=$SLURMD_PORT"
    else
      where="NodeAddr=127.0.0.1 Port=$((PORT + 100 + index)) NodeHostname=$1"
    fi
    echo "NodeName=node$index $where Features=$features"
  done
  cat <<END
PartitionName=gpu Nodes=node[1-$NODES] Default=YES MaxTime=1-00:00:00 DefaultTime=10 State=UP
PartitionName=cpu Nodes=node[1-$NODES] MaxTime=1-00:00:00 DefaultTime=10 State=UP
PartitionName=debug Nodes=node[1-$NODES] MaxTime=5 DefaultTime=2 MaxNodes=2 State=UP
PartitionName=spare Nodes=node[1-$NODES] MaxTime=1-00:00:00 DefaultTime=10 PriorityTier=0 State=UP
END
}

slurmdbd_conf() { # HOST
  cat <<END
AuthType=auth/munge
AuthInfo=socket=$RUN/munge.socket
DbdHost=$1
DbdAddr=127.0.0.1
DbdPort=$ACCOUNTING_PORT
SlurmUser=root
LogFile=$LOG/slurmdbd.log
PidFile=$RUN/slurmdbd.pid
DebugLevel=info
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=$DATABASE_PORT
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct_db
END
}

# ---------------------------------------------------------------- daemons

remember_daemon() { # NAME: one that has written RUN/NAME.pid
  await 60 "$1" test -s "$RUN/$1.pid" && remember "$1" "$(cat "$RUN/$1.pid")"
}

start_munge() {
  (umask 077 && head -c 1024 /dev/urandom >"$HOME_DIR/etc/munge.key")
  "${CLEAN[@]}" munged --key-file="$HOME_DIR/etc/munge.key" --socket="$RUN/munge.socket" \
    --pid-file="$RUN/munged.pid" --log-file="$LOG/munged.log" --seed-file="$RUN/munged.seed" \
    </dev/null >"$LOG/munged.out" 2>&1 && remember_daemon munged
}

start_database() {
  local socket=$RUN/mariadb.socket
  # Two at once would take each other's temporary tables in /tmp.
  TMPDIR=$RUN mariadb-install-db --no-defaults --user=root --datadir="$HOME_DIR/database" --skip-test-db \
    --auth-root-authentication-method=normal --innodb-log-file-size=8M \
    </dev/null >"$LOG/mariadb-install-db.log" 2>&1 || return 1
  # What it has written may be lost with the machine: that saves most of its time.
  "${CLEAN[@]}" setsid mariadbd --no-defaults --user=root --datadir="$HOME_DIR/database" \
    --socket="$socket" --pid-file="$RUN/mariadbd.pid" --log-error="$LOG/mariadbd.log" \
    --tmpdir="$RUN" --port="$DATABASE_PORT" --bind-address=127.0.0.1 --skip-name-resolve \
    --innodb-buffer-pool-size=32M --innodb-log-file-size=8M --innodb-lock-wait-timeout=900 \
    --innodb-flush-log-at-trx-commit=0 </dev/null >/dev/null 2>&1 &
  remember mariadbd $!
  await 90 mariadbd mariadb-admin --no-defaults -S "$socket" ping &&
    mariadb --no-defaults -S "$socket" -e "create database slurm_acct_db;
      create user 'slurm'@'127.0.0.1' identified by 'slurm';
      grant all on slurm_acct_db.* to 'slurm'@'127.0.0.1'"
}

start_accounting() {
  start_database || return 1
  "${CLEAN[@]}" slurmdbd </dev/null >>"$LOG/slurmdbd.log" 2>&1 && remember_daemon slurmdbd &&
    await 90 "an answer of slurmdbd" sacctmgr -n show cluster || return 1
  # Before the controller, which then finds them as it starts.
  {
    sacctmgr -iQ add cluster allranks &&
      sacctmgr -iQ add account main,alt Description=test Organization=test &&
      sacctmgr -iQ add user root Account=main,alt DefaultAccount=main
  } </dev/null >"$LOG/sacctmgr.log" 2>&1
}

start_controller() {
  pid_of slurmctld >/dev/null && return
  rm -f "$RUN/slurmctld.pid"
  "${CLEAN[@]}" slurmctld </dev/null >>"$LOG/slurmctld.log" 2>&1 && remember_daemon slurmctld &&
    await 60 "an answer of slurmctld" scontrol ping
}

all_idle() { [ "$(sinfo -h -N -p gpu -o %T | grep -cx idle)" = "$NODES" ]; }

# ---------------------------------------------------------------- the whole

up() { # exits 3 before it has begun anything, and 1 where that must be taken down
  local index
  [ "$(id -u)" = 0 ] || {
    say "only root can start a cluster"
    exit 3
  }
  install_packages || exit 3
  mkdir -p "$HOME_DIR"
  mkdir "$RUN" 2>/dev/null || {
    say "there is a cluster in $HOME_DIR: take it down first"
    exit 3
  }
  rm -rf "$LOG"
  mkdir -p "$HOME_DIR"/{etc,log,state,spool,dev,database}
  if [ "$MODE" = auto ]; then
    if can_netns; then MODE=netns; else MODE=ports; fi
  fi
  echo "$MODE" >"$RUN/mode"
  write_files
  if [ "$MODE" = netns ]; then
    ip link add "$BRIDGE" type bridge && ip addr add "$SUBNET.254/24" dev "$BRIDGE" &&
      ip link set "$BRIDGE" up || die "the network $SUBNET.0/24 could not be made"
  else # jobs read the machine's own file
    { echo "# $HOME_DIR begins"; sed 1,2d "$HOME_DIR/etc/hosts"; echo "# $HOME_DIR ends"; } >>/etc/hosts
  fi
  start_munge || die "munged did not start: see $LOG"
  start_accounting || die "the accounting did not start: $(tail -n 5 "$LOG"/maria*.log "$LOG"/slurmdbd.log 2>&1)"
  start_controller || die "slurmctld did not start: see $LOG/slurmctld.log"
  for ((index = 1; index <= NODES; index++)); do boot "$index"; done
  if ! await 90 "idle nodes" all_idle; then
    sinfo -N -l >&2
    sinfo -R >&2
    exit 1
  fi
  say "$NODES nodes of $GPUS GPUs each are up in mode $MODE: SLURM_CONF=$CONF"
}

job_processes() { # of this cluster; never the caller, whose environment only has SLURM_CONF
  local file pid
  for file in $(grep -lszxF "SLURM_CONF=$CONF" /proc/[0-9]*/environ); do
    pid=${file//[!0-9]/}
    if [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = slurmstepd ] || grep -qsz '^SLURMD_NODENAME=' "$file"; then
      echo "$pid"
    fi
  done
}

down() {
  local index pid
  if [ ! -f "$RUN/mode" ]; then
    rm -rf "$RUN"
    return 0
  fi
  read -r MODE <"$RUN/mode"
  stop slurmctld KILL # its state goes too
  for ((index = 1; index <= NODES; index++)); do
    if [ "$MODE" = netns ]; then crash "$index"; else stop "slurmd-node$index"; fi
  done
  if [ "$MODE" = netns ]; then
    ip link del "$BRIDGE" 2>/dev/null
  else
    for pid in $(job_processes); do kill -KILL "$pid" 2>/dev/null; done
    sed "\|^# $HOME_DIR begins|,\|^# $HOME_DIR ends|d" /etc/hosts >"$RUN/hosts"
    cat "$RUN/hosts" >/etc/hosts # not moved there: in a container it is a mount
  fi
  stop slurmdbd KILL
  stop mariadbd KILL
  stop munged
  rm -rf "$HOME_DIR"/{run,state,spool,database,dev,etc}
}

repair() {
  local index
  start_controller || die "slurmctld did not start: see $LOG/slurmctld.log"
  for ((index = 1; index <= NODES; index++)); do boot "$index"; done
}

status() {
  local file name
  for file in "$RUN"/*.process; do
    name=$(basename "$file" .process)
    echo "$name $(pid_of "$name" || echo dead)"
  done
  sinfo -N -l
}

cd /
case $VERB in
  install) install_packages || say "tests of the mark slurm will be skipped"; exit 0 ;;
  up)
    (up)
    code=$?
    [ $code != 1 ] || down
    exit $code
    ;;
  down) down; exit ;;
  env) echo "export SLURM_CONF=$CONF PATH=\$PATH:/usr/sbin"; exit ;;
  status | exec | crash | stop-slurmd | boot | stop-ctld | start-ctld | repair) ;;
  *) usage ;;
esac

read -r MODE 2>/dev/null <"$RUN/mode" || die "no cluster is up"
case $VERB in
  status) status ;;
  exec) index=$(index_of "${1:-}") && in_node "$index" "${@:2}" ;;
  crash) index=$(index_of "${1:-}") && crash "$index" ;;
  stop-slurmd) index_of "${1:-}" >/dev/null && stop "slurmd-$1" KILL ;;
  boot) index=$(index_of "${1:-}") && boot "$index" ;;
  stop-ctld) stop slurmctld ;;
  start-ctld) start_controller ;;
  repair) repair ;;
esac
