// The worker's side of the layer counter, with the time of every store: what raise-to-post is
// measured from. In C, because a call from Python just after a sleep takes microseconds itself.

#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>
#include <unistd.h>

static int64_t now_ns(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

// Raises the counter at `value` `raises` times, every `period_ns`, as LayerCounter::raise() does:
// store, fence, then wake the thread whose word at `sleeping` is set. stored[i]: just before the
// store. After a pause of this process the period starts anew, so that each raise is seen alone.
void raise_periodically(_Atomic uint64_t *value, _Atomic uint32_t *sleeping, int wake_fd,
                        uint64_t raises, int64_t period_ns, int64_t *stored) {
  const uint64_t one = 1;
  int64_t due = now_ns() + period_ns;
  for (uint64_t i = 0; i < raises; ++i) {
    const struct timespec until = {due / 1000000000, due % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {
    }
    const uint64_t next = atomic_load_explicit(value, memory_order_relaxed) + 1;
    stored[i] = now_ns();
    atomic_store_explicit(value, next, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if (atomic_load_explicit(sleeping, memory_order_relaxed) != 0 &&
        atomic_exchange(sleeping, 0) != 0) {
      while (write(wake_fd, &one, sizeof one) < 0 && errno == EINTR) {
      }
    }
    due = (stored[i] > due + period_ns ? stored[i] : due) + period_ns;
  }
}
