/* sys/thread.c: a thread that nobody joins, for what would make the caller wait.
 *
 * It blocks all its signals: a host program's handlers belong to its own threads, and SIGPIPE
 * stays pending for ever. */
#include "sys/sys.h"

#include <pthread.h>

extern char __libc_single_threaded __attribute__((weak)); /* of glibc, from 2.32 on */

#define THREAD_STACK 262144 /* thread-local variables of the host program lie in it, too */

/* There is no other thread for certain, so none can fork in the middle of what this one does. */
bool thread_is_alone(void) {
    return &__libc_single_threaded != NULL && __libc_single_threaded != 0;
}

/* Whoever called keeps `argument` if this fails. */
int thread_start(void *(*run)(void *), void *argument) {
    sigset_t all, before;
    pthread_t thread;
    pthread_attr_t attributes;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    (void)pthread_attr_init(&attributes);
    (void)pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    (void)pthread_attr_setstacksize(&attributes, THREAD_STACK);
    int r = -pthread_create(&thread, &attributes, run, argument);
    (void)pthread_attr_destroy(&attributes);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return r;
}
