#!/usr/bin/env bash
# Two real slurmd's on one machine, each in its own network, pid, uts and mount namespace with a private /tmp: two
# nodes, whose only shared temporary folder is the one named. Root only; needs Debian's slurmctld, slurmd, slurm-client,
# munge and iproute2. usage: cluster.sh try|up|down FOLDER; `try` leaves nothing, and fails where this machine cannot.
set -euo pipefail
checkout=$(realpath "$(dirname "$0")/../..")
S=$(realpath -m "${2:?the shared folder}")
export SLURM_CONF=$S/etc/slurm.conf
controller=/run/connector-tax-slurmctld.pid

# What is told by the machine and not by a folder, so that it also ends what a killed test run has left.
down() {
  for i in 1 2; do
    [ -e /run/netns/ct-n$i ] || continue
    # A process is gone for good, and with it its hold of the namespace, only when nobody sees it any longer.
    while pids=$(ip netns pids ct-n$i) && [ -n "$pids" ]; do kill -9 $pids 2>/dev/null || true; sleep 0.1; done
    ip netns del ct-n$i; ip link del ct-v$i 2>/dev/null || true
  done
  # Where munge ran already there is none of ours.
  [ ! -e "$controller" ] || pkill -9 -F "$controller" slurmctld || true
  [ ! -e /run/munge/connector-tax.pid ] || pkill -F /run/munge/connector-tax.pid munged || true
  ip link del ct-bridge 2>/dev/null || true
}

case $1 in
try)
  unshare --net --pid --fork --mount-proc --uts --mount bash -ec "
    ip link add ct-bridge type bridge; mount -t tmpfs tmpfs /tmp; mknod /tmp/gpu c 1 3";;
up)
  down
  mkdir -p "$S"/state/{ctld,n1,n2} "$S"/{etc,dev} /run/munge /etc/slurm
  # GPUs that Slurm hands out: any device file does.
  for gpu in 0 1; do mknod "$S/dev/gpu$gpu" c 1 3; done
  cat >"$S/etc/gres.conf" <<END
AutoDetect=off
NodeName=n[1-2] Name=gpu File=$S/dev/gpu[0-1]
END
  cat >"$SLURM_CONF" <<END
ClusterName=ct
SlurmctldHost=$(hostname)(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=$S/state/ctld
SlurmdSpoolDir=$S/state/%n
SlurmctldPidFile=$controller
SlurmdPidFile=$S/state/slurmd.%n.pid
SlurmctldLogFile=$S/state/slurmctld.log
SlurmdLogFile=$S/state/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MinJobAge=600
ReturnToService=2
SlurmdTimeout=30
KillWait=15
GresTypes=gpu
NodeName=n1 NodeAddr=10.77.0.11 CPUs=2 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
NodeName=n2 NodeAddr=10.77.0.12 CPUs=2 RealMemory=4000 Gres=gpu:2 State=UNKNOWN
PartitionName=bench Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE
PartitionName=shared Nodes=n1,n2 MaxTime=INFINITE State=UP OverSubscribe=NO
END
  ip link add ct-bridge type bridge; ip addr add 10.77.0.1/24 dev ct-bridge; ip link set ct-bridge up
  for i in 1 2; do
    ip netns add ct-n$i
    ip link add ct-v$i type veth peer name eth0 netns ct-n$i
    ip link set ct-v$i master ct-bridge; ip link set ct-v$i up
    ip -n ct-n$i addr add 10.77.0.1$i/24 dev eth0; ip -n ct-n$i link set eth0 up; ip -n ct-n$i link set lo up
  done
  chown munge: /run/munge; rm -f /run/munge/connector-tax.pid
  munge -n >/dev/null 2>&1 || setpriv --reuid munge --regid munge --clear-groups \
    munged --pid-file /run/munge/connector-tax.pid --log-file /var/log/munge/munged.log
  slurmctld -f "$SLURM_CONF"
  for i in 1 2; do
    nsenter --net=/run/netns/ct-n$i unshare --pid --fork --kill-child --mount-proc --uts --mount bash -c "
      hostname n$i; mkdir -p /run/ctshare /run/ctcode
      mount --bind '$checkout' /run/ctcode; mount --bind '$S' /run/ctshare; mount -t tmpfs -o mode=1777 tmpfs /tmp
      # The checkout may lie below /tmp, too.
      mkdir -p '$checkout' '$S'; mount --move /run/ctcode '$checkout'; mount --move /run/ctshare '$S'
      # A job step loses SLURM_CONF: on the nodes the configuration is also where Slurm looks for it.
      mount --bind '$S/etc' /etc/slurm
      exec slurmd -D -N n$i -f '$SLURM_CONF'" >"$S/state/n$i.out" 2>&1 </dev/null &
  done
  disown -a
  until [ "$(sinfo -h -t idle -o %D)" = 2 ]; do sleep 0.2; done;;
down) down;;
esac
