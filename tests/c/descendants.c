/* descendants.c: which processes of a table are ours: csrc/teardown/leftovers.c on a table that the test wrote.
 *
 * Reads "self spawn_ticks", then a line "pid parent start_ticks foreign" for each process; prints the
 * pids that are ours. */
#include <stdio.h>

#include "teardown/leftovers.c"

int main(void) {
    struct ir_group g = {0};
    struct processes all = {0};
    int pid, parent, foreign;
    unsigned long long ticks;
    static struct process table[100000];
    static pid_t foreigners[100000];
    if (scanf("%d %llu", &g.self, &ticks) != 2) return 1;
    g.spawn_ticks = ticks;
    g.foreign = foreigners;
    all.at = table;
    while (scanf("%d %d %llu %d", &pid, &parent, &ticks, &foreign) == 4) {
        table[all.n++] = (struct process){.pid = pid, .parent = parent, .start_ticks = ticks};
        if (foreign) foreigners[g.foreign_count++] = pid;
    }
    mark_descendants(&g, &all);
    for (size_t i = 0; i < all.n; i++)
        if (table[i].ours) printf("%d\n", (int)table[i].pid);
    return 0;
}
