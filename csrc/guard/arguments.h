/* guard/arguments.h: the arguments of irun-guard; argv[0] is its name. csrc/children/guard.c fills it. */
#ifndef GUARD_MAIN_H
#define GUARD_MAIN_H

#define GUARD_NAME "irun-guard"

enum { GUARD_SELF, GUARD_PARENT, GUARD_SESSION, GUARD_SINCE, GUARD_MARK, GUARD_FOLDER, GUARD_CGROUP,
       GUARD_LEASE, GUARD_WAIT, GUARD_LOCK, GUARD_ARGC };

/* GUARD_LEASE: "" is none. Else stdout is the pipe to the launcher, and stderr the memory of the
 * lease (sys/lease.h). The word says where orphans go while the launcher lives: to itself, or to
 * an ancestor of a host program. */
#define GUARD_LEASE_OWN "own"
#define GUARD_LEASE_HOST "host"

/* GUARD_WAIT: "" or how many milliseconds the workers have to exit, before SIGKILL for them
 * alone. */
#define GUARD_WAIT_MOST_MS 3600000

/* GUARD_LOCK: "" is none. Else the launcher holds a lock on the pipe at stdin. */
#define GUARD_LOCKED "locked"

#endif
