#!/usr/bin/env bash
# A SLURM cluster of three hosts on this machine. `unshare` starts this script as process 1 of new namespaces, so that all
# that it starts, mounts and connects ends with it:
#   unshare --net --mount --uts --pid --fork --kill-child --mount-proc tests/support/slurm_hosts.sh head FOLDER
# The head runs slurmctld. Each host has its own network, name, processes and /dev/shm; they share the other files.
# A host has two addresses: 10.77.0.N on ib0, to which its name resolves, and 10.78.0.N on eth1.
# FOLDER gets the logs, and `nodeN.pid` with the process to kill when the power of nodeN fails.
set -euo pipefail
role=$1 folder=$2

# Connect an interface of a host to a bridge of the head.
connect() { # HOST NUMBER PROCESS INTERFACE NETWORK
    ip link add "$1-$4" type veth peer name "$4" netns "$3"
    ip link set "$1-$4" master "$5" up
}

if [ "$role" != head ]; then
    number=${role#node}
    hostname "$role"
    mount -t tmpfs tmpfs /dev/shm
    mount -t tmpfs tmpfs /sys/fs/cgroup
    until [ -e /sys/class/net/eth1 ] || ip link show eth1 > /dev/null 2>&1; do sleep 0.05; done
    ip link set lo up
    ip addr add "10.77.0.$number/24" dev ib0
    ip addr add "10.78.0.$number/24" dev eth1
    ip link set ib0 up
    ip link set eth1 up
    # Not `exec`: this shell is process 1 of the host, which must collect the processes that lost their parents.
    slurmd -D -N "$role" > "$folder/$role.out" 2>&1 &
    wait
    exit
fi

hostname head
ip link set lo up
for network in 77 78; do
    ip link add "net$network" type bridge
    ip addr add "10.$network.0.254/24" dev "net$network"
    ip link set "net$network" up
done
# Nothing of this machine's own SLURM and MUNGE is read or written.
mount -t tmpfs tmpfs /etc/slurm
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
{
    echo "127.0.0.1 localhost"
    echo "10.77.0.254 head"
    for number in 1 2 3; do echo "10.77.0.$number node$number"; done
} > /run/hosts
mount --bind /run/hosts /etc/hosts
cat > /etc/slurm/slurm.conf << END
ClusterName=test
SlurmctldHost=head(10.77.0.254)
SlurmUser=root
StateSaveLocation=/run/slurmctld
SlurmdSpoolDir=/run/slurmd-%n
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
# A requeued job waits until its credential has expired.
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdTimeout=8
KillWait=5
ReturnToService=2
GresTypes=gpu
NodeName=node1 NodeAddr=10.77.0.1 CPUs=16 RealMemory=128000 Gres=gpu:4
NodeName=node2 NodeAddr=10.77.0.2 CPUs=16 RealMemory=128000 Gres=gpu:4
NodeName=node3 NodeAddr=10.77.0.3 CPUs=16 RealMemory=128000 Gres=gpu:4
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=abrupt Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF
END
# GPUs that the job files ask for: devices that are none.
for number in 1 2 3 4; do mknod "/run/gpu$number" c 1 3; done
echo "Name=gpu File=/run/gpu[1-4]" > /etc/slurm/gres.conf
echo "CgroupPlugin=cgroup/v1" > /etc/slurm/cgroup.conf
mkdir -m 755 /run/munge /run/slurmctld
(umask 077 && head -c 128 /dev/urandom > /run/munge/key)
munged --key-file /run/munge/key --log-file "$folder/munged.log" --pid-file /run/munge/pid --seed-file /run/munge/seed
slurmctld -D > "$folder/slurmctld.out" 2>&1 &
own=$(readlink /proc/self/ns/net)
for number in 1 2 3; do
    unshare --net --mount --uts --pid --fork --kill-child --mount-proc "$0" "node$number" "$folder" &
    host=$!
    until [ "$(readlink "/proc/$host/ns/net")" != "$own" ]; do sleep 0.05; done
    connect "node$number" "$number" "$host" ib0 net77
    connect "node$number" "$number" "$host" eth1 net78
    echo "$host" > "$folder/node$number.pid"
done
until [ "$(sinfo --noheader --Node --states=idle --partition=main | wc -l)" = 3 ]; do sleep 0.2; done
touch "$folder/ready"
wait
