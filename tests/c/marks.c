/* marks.c: csrc/sys/procfs.c on one process: how often its environment has the mark, has none, or cannot be told yet.
 *
 * Arguments: the pid, the mark, how many looks. Prints the three counts. Without arguments it executes itself without end. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "group/group.h"

int main(int argc, char **argv) {
    if (argc == 1) return execv("/proc/self/exe", argv);
    if (argc != 4) return 2;
    int counts[3] = {0};
    const pid_t pid = atoi(argv[1]);
    for (int i = atoi(argv[3]); i > 0; i--) counts[process_mark(pid, argv[2])]++;
    printf("%d %d %d\n", counts[MARK_FOUND], counts[MARK_NONE], counts[MARK_UNKNOWN]);
    return 0;
}
