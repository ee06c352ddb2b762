#!/bin/bash
# A real OpenPBS (PBS_EXEC, default /opt/pbs; Debian has no package) with N emulated nodes on one machine, for root.
#   pbs.sh start [DIR] [NODES=4] [NCPUS=64] [NGPUS=8]     then:  . DIR/env.sh ; tbu qsub ... ; tb pbsnodes -a
#   pbs.sh stop  [DIR]
#   pbs.sh where                                         says how to get one where there is none
#   pbs.sh node-down DIR K | cable DIR K up|down | on DIR K cmd...
# tb runs a command on the head as root, tbu as a normal user (pbs, uid 2001, home DIR/user). Submit as that user: pbs_mom
# does not signal what root runs, so a job of root's never sees the TERM that a user's job gets.
# head (pbs_server, pbs_comm, pbs_sched, postgres) and node1..N (pbs_mom) each have their own network (10.79.0.x), UTS,
# mount and pid namespace and an overlay over /etc (own /etc/pbs.conf and /etc/hosts): the machine's /etc is not touched.
# The pid namespace matters: pbs_db_utility kills every ".../bin/postgres" whose parent is process 1.
# PBS_TB_HISTORY=False leaves the job history off, which is PBS's own default. PBS_TB_SHOW="PATH...": what the user pbs
# is to reach though a folder above is closed to others (an interpreter below /root): for the bed alone, that folder has
# nothing but these. PBS_TB_NSPREFIX: of the names of network namespaces, for two beds at a time.
# Needs Debian's postgresql (user postgres), iproute2, and OpenPBS: build it as the file INSTALL of its sources says,
# https://github.com/openpbs/openpbs/blob/master/INSTALL, with the prefix /opt/pbs, or set PBS_EXEC to yours, and
# with a Python that no user's folder has. 23.06.06 needs commit 1d17427c0 of its master for Python 3.11.
set -u
cmd=${1:-}; D=${2:-/tmp/pbs-testbed}; P=${PBS_TB_NSPREFIX:-ptb}; X=${PBS_EXEC:-/opt/pbs}

host_pid() { pgrep -P "$(cat "$D/$1.pid")" 2>/dev/null | head -1; }
on() { local h=$1; shift; nsenter -t "$(host_pid $h)" -m -u -n -p -- "$@"; }

closed_above() {  # the first folder of a path that others may not enter
    local part at=
    for part in $(dirname "$1" | tr / ' '); do
        at=$at/$part
        case $(stat -c %A "$at") in *[xt]) ;; *) echo "$at"; return ;; esac
    done
}

show() {  # in a host's own mount namespace: folder for mounts, paths
    local at=$1 path closed n=0
    shift
    for path; do n=$((n + 1)); mkdir -p "$at/$n"; mount --bind "$path" "$at/$n"; done
    n=0
    for path; do
        n=$((n + 1)); closed=$(closed_above "$path")
        [ -z "$closed" ] || mount -t tmpfs -o mode=755 tmpfs "$closed"
        [ -d "$path" ] || { mkdir -p "$path"; mount --bind "$at/$n" "$path"; }
    done
}
export -f show closed_above

mkhost() {  # name
    local h=$1
    mkdir -p "$D/$h"/{etc,work,pbs} $X/home
    cp "$D/hosts" "$D/$h/etc/hosts"; rm -f "$D/$h/etc/pbs.conf"
    { cat /etc/passwd; echo "pbs:x:2001:2001::$D/user:/bin/sh"; } >"$D/$h/etc/passwd"; { cat /etc/group; echo "pbs:x:2001:"; } >"$D/$h/etc/group"
    { echo "PBS_EXEC=$X"; echo "PBS_HOME=$X/home"; echo "PBS_SERVER=head"; echo "PBS_CORE_LIMIT=0"; echo "PBS_SCP=/bin/false"
      if [ $h = head ]; then printf '%s\n' PBS_START_SERVER=1 PBS_START_SCHED=1 PBS_START_COMM=1 PBS_START_MOM=0
      else printf '%s\n' PBS_START_SERVER=0 PBS_START_SCHED=0 PBS_START_COMM=0 PBS_START_MOM=1; fi; } >"$D/$h/etc/pbs.conf"
    nsenter --net=/run/netns/$P$h setsid unshare -mup --fork --kill-child --mount-proc --propagation private bash -c "
        hostname $h; mount -t overlay overlay -o lowerdir=/etc,upperdir='$D/$h/etc',workdir='$D/$h/work' /etc
        mount --bind '$D/$h/pbs' $X/home    # PBS refuses a PBS_HOME below a world-writable directory such as /tmp
        mount -t tmpfs tmpfs /run; mkdir -p /run/postgresql /run/lock; chown postgres: /run/postgresql
        show $D/$h/show ${PBS_TB_SHOW:-}
        touch '$D/$h/ready'; while :; do sleep 1000 & wait; done" </dev/null >"$D/$h.out" 2>&1 &
    echo $! >"$D/$h.pid"
    for i in $(seq 100); do [ -e "$D/$h/ready" ] && return; sleep 0.02; done; cat "$D/$h.out"; return 1
}

tb_start() {
    local N=${1:-4} C=${2:-64} G=${3:-8} k a i
    export PATH=$X/bin:$X/sbin:/usr/sbin:/usr/bin:/sbin:/bin; unset PYTHONPATH PYTHONHOME TMPDIR
    mkdir -p "$D/user"; chmod 755 "$D"; chown 2001:2001 "$D/user"; echo "N=$N" >"$D/mode"
    { echo "127.0.0.1 localhost"; echo "10.79.0.254 head"; for k in $(seq "$N"); do echo "10.79.0.$k node$k"; done; } >"$D/hosts"
    ip netns add ${P}head; ip -n ${P}head link add br0 type bridge; ip -n ${P}head addr add 10.79.0.254/24 dev br0
    ip -n ${P}head link set br0 up; ip -n ${P}head link set lo up
    for k in $(seq "$N"); do
        ip netns add ${P}node$k; ip -n ${P}node$k link add eth0 type veth peer name v$k netns ${P}head
        ip -n ${P}head link set v$k master br0 up
        ip -n ${P}node$k addr add 10.79.0.$k/24 dev eth0; ip -n ${P}node$k link set eth0 up; ip -n ${P}node$k link set lo up
    done
    mkhost head || return 1
    for k in $(seq "$N"); do mkhost node$k || return 1; done
    on head $X/libexec/pbs_postinstall server 23.06.06 $X $X/home "" sameconf >"$D/post.log" 2>&1
    on head $X/sbin/pbs_comm >"$D/comm.out" 2>&1      # before pbs_habitat, which starts and stops a pbs_server
    on head $X/libexec/pbs_habitat >"$D/habitat.log" 2>&1 || { tail "$D/habitat.log"; return 1; }
    on head $X/sbin/pbs_server >"$D/server.out" 2>&1 || { cat "$D/server.out"; return 1; }
    sed -i 's/^resources: "/resources: "ngpus, /' "$D/head/pbs/sched_priv/sched_config"
    on head $X/sbin/pbs_sched >"$D/sched.out" 2>&1
    # one command per line on stdin: of several -c only the last is carried out
    printf '%s\n' "set server flatuid=True" "set server acl_roots+=root@*" "set server job_history_enable=${PBS_TB_HISTORY:-True}" \
        "create resource ngpus type=long,flag=hn" "set server scheduler_iteration=1" "set server scheduling=True" |
        on head $X/bin/qmgr 2>"$D/qmgr.err" >/dev/null
    for k in $(seq "$N"); do
        on node$k $X/libexec/pbs_postinstall execution 23.06.06 $X $X/home sameconf >"$D/node$k/post.log" 2>&1
        printf '%s\n' '$usecp *:/ /' '$logevent 0x1ff' >"$D/node$k/pbs/mom_priv/config"
        on node$k $X/sbin/pbs_mom >"$D/node$k/mom.out" 2>&1 || cat "$D/node$k/mom.out"
        on head $X/bin/qmgr -c "create node node$k resources_available.ncpus=$C,resources_available.mem=8gb,resources_available.ngpus=$G" 2>>"$D/qmgr.err"
    done
    { echo "export PBS_TB='$D'"
      echo "tb() { nsenter -t \$(pgrep -P \$(cat '$D/head.pid') | head -1) -m -u -n -p env PATH=$X/bin:\$PATH sh -c 'cd \"\$0\" && exec \"\$@\"' \"\$PWD\" \"\$@\"; }"
      echo "tbu() { nsenter -t \$(pgrep -P \$(cat '$D/head.pid') | head -1) -m -u -n -p setpriv --reuid=2001 --regid=2001 --clear-groups env HOME='$D/user' USER=pbs LOGNAME=pbs PATH=$X/bin:\$PATH sh -c 'cd \"\$HOME\" && exec \"\$@\"' sh \"\$@\"; }"; } >"$D/env.sh"
    for i in $(seq 200); do
        [ "$(on head $X/bin/pbsnodes -a 2>/dev/null | grep -c '^ *state = free')" = "$N" ] && { echo "$D"; return 0; }; sleep 0.1
    done
    on head $X/bin/pbsnodes -a; return 1
}
tb_stop() {
    local h k; [ -f "$D/mode" ] || return 0; . "$D/mode"
    on head timeout 10 $X/bin/qterm -t quick >/dev/null 2>&1
    for h in $(seq -f node%g "$N") head; do kill -9 $(host_pid $h) 2>/dev/null; rm -f "$D/$h.pid" "$D/$h/ready"; ip netns del $P$h; done
}
case $cmd in
    start) shift; [ $# -gt 0 ] && shift; tb_start "$@" ;;
    stop)  tb_stop ;;
    where) # What INSTALL says is the project's own, and changes with it, so there is no copy of it here.
        [ -x "$X/sbin/pbs_mom" ] || { echo "there is no OpenPBS in $X (PBS_EXEC):"; sed -n "/^# Needs Debian/,/^[^#]/{/^#/p}" "$0"; } ;;
    node-down) ip -n ${P}head link set v$3 down; kill -9 $(host_pid node$3) ;;
    cable) ip -n ${P}head link set v$3 $4 ;;
    on) h=$3; shift 3; on $h "$@" ;;
    *) sed -n "2,/^[^#]/{/^#/p}" "$0"; exit 2 ;;
esac
