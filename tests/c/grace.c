/* grace.c: `grace GRACE TOLD AGO`: how long strays have, of a grace of so many milliseconds, where a signal (TOLD is 1) or
 * a failure (0) began the stop so many milliseconds ago. */
#include "group/stop_state.c"

#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    struct ir_group g = {.grace_ms = atol(argv[1])};
    if (atoi(argv[2])) g.grace_began_ns = clock_ns() - atol(argv[3]) * NS_PER_MS;
    (void)printf("%ld\n", (long)strays_grace_ms(&g));
    return 0;
}
