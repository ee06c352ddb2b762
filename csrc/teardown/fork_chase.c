/* teardown/fork_chase.c: what forks and exits without end.
 *
 * It is gone from its place in a list of processes. But each of its generations has a new
 * number, and proc_loadavg(5) has the newest. The chase looks at later ones as they come. */
#include "teardown/teardown.h"
#include "sys/sys.h"

#include <stdlib.h>
#include <string.h>

#define CHASE_NS                                                                                   \
    (50 * NS_PER_MS) /* that it continues and finds nobody, where others fork and exit, too */
#define AT_ONCE                                                                                    \
    64 /* numbers, the newest: a read of more would let their processes run on to the next */

/* The newest number of a process or a thread of this PID namespace; 0: unknown. Taken before the
 * look that the chase follows. */
pid_t chase_begin(void *with) {
    (void)with;
    char text[128];
    if (process_file("/proc/loadavg", text, sizeof text) < 0) return 0;
    const char *last = strrchr(text, ' ');
    return last == NULL ? 0 : atoi(last + 1);
}

/* `newest_now` is chase_begin, or knows more. Calls `kill_ours` for the numbers since `last`,
 * the newest first and of many only these. That lasts until all of them are gone or strangers',
 * for GIVE_UP_MS at most; one that has gone may have left a child. Returns whether any was a
 * leftover. */
bool chase(pid_t last, pid_t (*newest_now)(void *), enum chased (*kill_ours)(pid_t, void *),
           void *with) {
    bool killed = false;
    const int64_t give_up_ns = clock_ns() + GIVE_UP_MS * NS_PER_MS;
    for (int64_t end_ns = clock_ns() + CHASE_NS; clock_ns() <= end_ns && end_ns <= give_up_ns;) {
        const pid_t newest = newest_now(with);
        unsigned seen[CHASED_KILLED + 1] = {0};
        if (newest < last) last = 0; /* the numbers began anew */
        const bool is_whole = newest - last <= AT_ONCE;
        for (pid_t pid = newest; pid > last && newest - pid < AT_ONCE; pid--)
            seen[kill_ours(pid, with)]++;
        last = newest;
        if (seen[CHASED_KILLED] > 0) {
            killed = true;
            end_ns = clock_ns() + CHASE_NS;
        } else if (is_whole && seen[CHASED_GONE] == 0) {
            break;
        }
    }
    return killed;
}
