/* sys/thread.c: a thread that nobody joins, for what would make the caller wait.
 *
 * It blocks all its signals: a host program's handlers belong to its own threads, and SIGPIPE
 * stays pending for ever. */
#include "sys/sys.h"

#include <pthread.h>

#define THREAD_STACK 262144 /* thread-local variables of the host program lie in it, too */

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
