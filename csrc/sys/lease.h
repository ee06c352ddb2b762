/* sys/lease.h: the word that a launcher, its guard, and its children until their exec share: when
 * the lease ends.
 *
 * By CLOCK_BOOTTIME, which also runs while the machine sleeps. The launcher moves it on. Whoever
 * first finds it past puts 0 there, and 0 stays: after that nobody renews it and no child
 * executes its program.
 *
 * Beside it stands what the guard sends to the head of many nodes after the launcher's death, when
 * nothing of the launch lives any more. */
#ifndef SYS_LEASE_H
#define SYS_LEASE_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define LEASE_WORD_MOST 64u

/* What launcher and guard share. `deadline_ns` comes first: a child looks at nothing else. */
struct lease_memory {
    int64_t deadline_ns;
    uint32_t address_size, last_word_size; /* 0: the guard tells nobody */
    char address[128];                     /* of the head, a sockaddr */
    char last_word[LEASE_WORD_MOST];       /* for the head, when the launch is dead */
};

/* What the guard writes for the launcher: it watches over the lease; the lease expired and it killed the ranks. */
enum { LEASE_HELD = 'h', LEASE_OVER = 'o' };

static inline int64_t lease_deadline(const int64_t *lease) {
    return __atomic_load_n(lease, __ATOMIC_SEQ_CST);
}

static inline bool lease_is_over(int64_t *lease, int64_t now_ns) {
    int64_t deadline_ns = lease_deadline(lease);
    while (deadline_ns != 0 && deadline_ns <= now_ns)
        if (__atomic_compare_exchange_n(lease, &deadline_ns, 0, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST))
            return true;
    return deadline_ns == 0;
}

/* It never gets shorter. False: it has run out. */
static inline bool lease_move(int64_t *lease, int64_t now_ns, int64_t to_ns) {
    while (!lease_is_over(lease, now_ns)) {
        int64_t deadline_ns = lease_deadline(lease);
        if (deadline_ns >= to_ns) return true;
        if (deadline_ns != 0 &&
            __atomic_compare_exchange_n(lease, &deadline_ns, to_ns, false, __ATOMIC_SEQ_CST,
                                        __ATOMIC_SEQ_CST))
            return true;
    }
    return false;
}

static inline int64_t boottime_ns(void) {
    struct timespec now;
    (void)clock_gettime(CLOCK_BOOTTIME, &now);
    return (int64_t)now.tv_sec * 1000000000LL + now.tv_nsec;
}

#endif
