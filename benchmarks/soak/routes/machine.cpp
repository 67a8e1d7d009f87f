// SPDX-License-Identifier: Apache-2.0
// The wall clock and the disk of a process, as a file says: LD_PRELOAD this library, and name the
// file in SOAK_MACHINE. It holds two numbers of 64 bits: seconds by which the wall clock is ahead,
// and whether the disk is full for what is saved (in files below SOAK_DISK). Monotonic clocks are
// left alone, as they are when a clock is set.

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct State {
  volatile long long ahead;
  volatile long long is_full;
};

const State& state() {
  static const State* shared = [] {
    static State none{};
    const char* path = getenv("SOAK_MACHINE");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return static_cast<const State*>(&none);
    void* mapped = mmap(nullptr, sizeof(State), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    return mapped == MAP_FAILED ? static_cast<const State*>(&none)
                                : static_cast<const State*>(mapped);
  }();
  return *shared;
}

template <typename Function>
Function original(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

bool is_refused(int file) {
  static const char* disk = getenv("SOAK_DISK");
  if (!disk || !state().is_full) return false;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0 || strncmp(path, disk, strlen(disk)) != 0) return false;
  errno = ENOSPC;
  return true;
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t clock, timespec* now) {
  static auto call = original<int (*)(clockid_t, timespec*)>("clock_gettime");
  int result = call(clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
    now->tv_sec += state().ahead;
  return result;
}

int gettimeofday(timeval* now, void* zone) {
  static auto call = original<int (*)(timeval*, void*)>("gettimeofday");
  int result = call(now, zone);
  if (result == 0) now->tv_sec += state().ahead;
  return result;
}

time_t time(time_t* now) {
  timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}

ssize_t write(int file, const void* data, size_t size) {
  static auto call = original<ssize_t (*)(int, const void*, size_t)>("write");
  return is_refused(file) ? -1 : call(file, data, size);
}

ssize_t writev(int file, const iovec* parts, int count) {
  static auto call = original<ssize_t (*)(int, const iovec*, int)>("writev");
  return is_refused(file) ? -1 : call(file, parts, count);
}

ssize_t pwrite64(int file, const void* data, size_t size, off64_t offset) {
  static auto call = original<ssize_t (*)(int, const void*, size_t, off64_t)>("pwrite64");
  return is_refused(file) ? -1 : call(file, data, size, offset);
}

int ftruncate64(int file, off64_t size) {
  static auto call = original<int (*)(int, off64_t)>("ftruncate64");
  return is_refused(file) ? -1 : call(file, size);
}

}  // extern "C"
