// A realtime clock that is ten minutes ahead while /tmp/clock-ahead exists; loaded with LD_PRELOAD.
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int ahead_s = 600;  // less than a token of the SDK lives

int clock_gettime(clockid_t clock, struct timespec *found) {
  int status = syscall(SYS_clock_gettime, clock, found);
  if (status == 0 && clock == CLOCK_REALTIME && access("/tmp/clock-ahead", F_OK) == 0)
    found->tv_sec += ahead_s;
  return status;
}

int gettimeofday(struct timeval *found, void *zone) {
  struct timespec now;
  int status = clock_gettime(CLOCK_REALTIME, &now);
  found->tv_sec = now.tv_sec;
  found->tv_usec = now.tv_nsec / 1000;
  return status;
}

time_t time(time_t *found) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (found) *found = now.tv_sec;
  return now.tv_sec;
}
