/* stat.c: libFuzzer on what is read of /proc/PID/stat: any name, any numbers, and any bytes at all.
 *
 * The first byte of an input says which: a line made of the rest (then every field is checked), or the rest as it
 * is (then nothing may be touched that is not there). */
#include <inttypes.h>
#include <limits.h>

#include "sys/procfs.c"

#define CHECK(what) ((what) ? (void)0 : fail(#what, __LINE__))

static void fail(const char *what, int line) {
    (void)fprintf(stderr, "tests/fuzz/stat.c:%d: not true: %s\n", line, what);
    abort();
}

static void take(const uint8_t **at, size_t *left, void *ret, size_t size) {
    memset(ret, 0, size);
    if (size > *left) size = *left;
    memcpy(ret, *at, size);
    *at += size;
    *left -= size;
}

/* A line as the kernel makes it: a name of up to 15 bytes, the state, and 50 numbers. */
static void check_line(const uint8_t *at, size_t left) {
    char stat[STAT_SIZE], name[16], state;
    uint64_t numbers[50];
    take(&at, &left, &state, 1);
    take(&at, &left, name, 15);
    name[15] = '\0';
    state = (char)('A' + (state & 31));
    int size = snprintf(stat, sizeof stat, "1 (%s) %c", name, state);
    for (int field = 4; field <= 52; field++) {
        uint64_t *number = &numbers[field - 4];
        take(&at, &left, number, 8);
        if (field == 4) *number &= INT_MAX;
        size += snprintf(stat + size, sizeof stat - (size_t)size, " %" PRIu64, *number);
    }
    (void)snprintf(stat + size, sizeof stat - (size_t)size, "\n");
    CHECK((size_t)size + 2 < sizeof stat);
    for (int field = 4; field <= 52; field++)
        CHECK(stat_number(stat, field) == numbers[field - 4]);
    struct process process;
    CHECK(stat_parse(stat, 1, &process) == 0);
    CHECK(process.pid == 1 && process.state == state);
    CHECK((uint64_t)process.parent == numbers[0]);
    CHECK(process.start_ticks == numbers[22 - 4]);
    CHECK(strcmp(process.name, name) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size == 0) return 0;
    if (data[0] & 1) {
        check_line(data + 1, size - 1);
        return 0;
    }
    char *stat = strndup((const char *)data + 1, size - 1);
    struct process process;
    (void)stat_number(stat, STAT_ENV_START);
    if (stat_parse(stat, 1, &process) == 0) CHECK(strlen(process.name) < sizeof process.name);
    free(stat);
    return 0;
}
