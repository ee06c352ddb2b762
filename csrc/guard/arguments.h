/* guard/arguments.h: what irun-guard is called with; argv[0] is its name. csrc/children/guard.c fills it. */
#ifndef GUARD_MAIN_H
#define GUARD_MAIN_H

enum { GUARD_SELF, GUARD_PARENT, GUARD_SESSION, GUARD_SINCE, GUARD_MARK, GUARD_FOLDER, GUARD_CGROUP, GUARD_ARGC };

#endif
