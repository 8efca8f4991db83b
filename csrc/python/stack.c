/* Finds how much of its stack a thread has left. */
#include "python/binding.h"

#include <pthread.h>
#if defined(_WIN32)
#include <windows.h>
#endif

/* Holds the lowest address of a thread's stack. A thread-local variable could end the process
 * (runtime/members.h). */
static pthread_key_t lowest_key;
static bool has_key;

__attribute__((constructor)) static void make_key(void) { has_key = pthread_key_create(&lowest_key, NULL) == 0; }

/* Returns NULL if the system does not tell. */
static char *find_lowest(void) {
    char *lowest = NULL;
#if defined(__linux__)
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes) == 0) {
        void *start = NULL;
        size_t size;
        lowest = pthread_attr_getstack(&attributes, &start, &size) == 0 ? start : NULL;
        pthread_attr_destroy(&attributes);
    }
#elif defined(__APPLE__)
    lowest = (char *)pthread_get_stackaddr_np(pthread_self()) - pthread_get_stacksize_np(pthread_self());
#elif defined(_WIN32)
    ULONG_PTR low, high;
    GetCurrentThreadStackLimits(&low, &high);
    lowest = (char *)low;
#endif
    return lowest;
}

ptrdiff_t sa_stack_left(void) {
    char *lowest = has_key ? pthread_getspecific(lowest_key) : NULL;
    if (lowest == NULL && has_key && (lowest = find_lowest()) != NULL) {
        pthread_setspecific(lowest_key, lowest); /* without memory it is found again next time */
    }
    const char *here = __builtin_frame_address(0);
    return lowest == NULL || here < lowest ? PTRDIFF_MAX : here - lowest; /* here < lowest: a coroutine's own stack */
}
