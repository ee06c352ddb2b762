/* sys/kernel.c: the kernel's version, where no system call says what it does. */
#include "sys/sys.h"

#include <stdio.h>
#include <sys/utsname.h>

/* False too if its version is none. */
bool kernel_is(int major, int minor) {
    struct utsname us;
    int its_major = 0, its_minor = 0;
    if (uname(&us) < 0 || sscanf(us.release, "%d.%d", &its_major, &its_minor) != 2) return false;
    return its_major > major || (its_major == major && its_minor >= minor);
}
