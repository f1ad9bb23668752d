/* Faults in the calls by which a process changes files below one directory.
 *
 * Loaded with LD_PRELOAD it counts these calls, in the order in which all threads and all processes that
 * share a plan make them, and lets one fault happen at a chosen number. The plan is a small file that every
 * process maps; plan.py writes it and names its fields in the same order. Without a plan every call passes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x53544c46
#define TEXT 1024

enum { PASS, KILL, FAIL, SHORT, ZERO, STALL, PAUSE };
enum { BEFORE, AFTER, MIDDLE };

struct plan {
  uint32_t magic;
  int32_t what, when, code, lasting, reads;
  int64_t at, micros;
  _Atomic int64_t calls, fired, paused, resumed;
  _Atomic int32_t kind, turn;
  char struck[TEXT], root[TEXT], alias[TEXT], log[TEXT];
};

static struct plan *plan;
static __thread int busy;

/* What passes by here keeps the order of first use: a number per kind of call. */
enum {
  OPEN = 1, OPENDIR, CREATE, READ, WRITE, SYNC, ALLOCATE, TRUNCATE, LINK, RENAME, UNLINK, MKDIR, RMDIR, CLOSE,
  RELEASE, RANGE, MODE
};
/* CREATE opens for writing, OPEN for reading; CLOSE ends the former, RELEASE the latter. */
static const char *const names[] = {
  "", "open", "opendir", "create", "read", "write", "sync", "allocate", "truncate", "link", "rename", "unlink",
  "mkdir", "rmdir", "close", "release", "range", "mode"
};

#define REAL(result, name, ...)                                                                    \
  static result (*real)(__VA_ARGS__);                                                              \
  if (!real) *(void **)(&real) = dlsym(RTLD_NEXT, name)

static long (*raw)(long, ...);

static long system_call(long number, long a, long b, long c, long d) {
  if (!raw) *(void **)(&raw) = dlsym(RTLD_NEXT, "syscall");
  return raw(number, a, b, c, d, 0L, 0L);
}

/* Begin to follow another plan; an empty or missing path ends that. Returns 0, or an errno. */
int torchrelay_chaos_plan(const char *path) {
  plan = NULL;
  if (!path || !*path) return 0;
  int fd = (int)system_call(SYS_openat, AT_FDCWD, (long)path, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) return errno;
  void *found = mmap(NULL, sizeof *plan, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  int failed = found == MAP_FAILED ? errno : 0;
  system_call(SYS_close, fd, 0, 0, 0);
  if (failed) return failed;
  if (((struct plan *)found)->magic != MAGIC) return EINVAL;
  plan = found;
  return 0;
}

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("TORCHRELAY_CHAOS_PLAN");
  if (path && *path && torchrelay_chaos_plan(path) != 0) {
    static const char text[] = "torchrelay chaos: TORCHRELAY_CHAOS_PLAN names no plan\n";
    system_call(SYS_write, 2, (long)text, sizeof text - 1, 0);
    _exit(2);
  }
}

/* Which files */

static int starts(const char *path, const char *root) {
  size_t length = strlen(root);
  return length && strncmp(path, root, length) == 0 && (path[length] == '/' || path[length] == '\0');
}

static const char *ours(const char *path) {
  return starts(path, plan->root) || starts(path, plan->alias) ? path : NULL;
}

static const char *of_descriptor(char *buffer, int fd) {
  char name[64];
  if (!plan || busy || fd < 0) return NULL;
  int kept = errno;
  snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
  long length = system_call(SYS_readlinkat, AT_FDCWD, (long)name, (long)buffer, PATH_MAX - 1);
  errno = kept;
  if (length <= 0) return NULL;
  buffer[length] = '\0';
  return ours(buffer);
}

static const char *of_path(char *buffer, int directory, const char *path) {
  if (!plan || busy || !path || !*path) return NULL;
  if (*path == '/') return ours(path);
  char base[PATH_MAX], name[64] = "/proc/self/cwd";
  int kept = errno;
  if (directory != AT_FDCWD) snprintf(name, sizeof name, "/proc/self/fd/%d", directory);
  long length = system_call(SYS_readlinkat, AT_FDCWD, (long)name, (long)base, sizeof base - 1);
  errno = kept;
  if (length <= 0) return NULL;
  base[length] = '\0';
  if (snprintf(buffer, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return NULL;
  return ours(buffer);
}

/* What happens to a call */

struct call {
  int act, kind;
  int64_t number;
  const char *path;
};

static void wait_micros(int64_t micros) {
  struct timespec left = {micros / 1000000, micros % 1000000 * 1000};
  while (nanosleep(&left, &left) == -1 && errno == EINTR) continue;
}

static void die(void) {
  kill((pid_t)system_call(SYS_getpid, 0, 0, 0, 0), SIGKILL);
  for (;;) pause();
}

/* Wait until the other side has looked; one call at a time, so that the number says which. */
static void stand_still(int64_t number) {
  int32_t free_turn = 0;
  while (!atomic_compare_exchange_weak(&plan->turn, &free_turn, 1)) {
    free_turn = 0;
    wait_micros(50);
  }
  atomic_store(&plan->paused, number);
  while (atomic_load(&plan->resumed) < number) wait_micros(50);
  atomic_store(&plan->turn, 0);
}

static void strike(struct call *call) {
  if (atomic_fetch_add(&plan->fired, 1) == 0) {
    atomic_store(&plan->kind, call->kind);
    snprintf(plan->struck, TEXT, "%s %s", names[call->kind], call->path);
  }
}

static int due(int64_t number, int kind) {
  if (!plan->what || !plan->at) return 0;
  if (number == plan->at) return 1;
  if (!plan->lasting || number < plan->at) return 0;
  return plan->what == PAUSE || atomic_load(&plan->kind) == kind;
}

static struct call enter(int kind, const char *path) {
  struct call call = {PASS, kind, 0, path};
  if (!path || (kind == READ && !plan->reads)) {
    call.path = NULL;
    return call;
  }
  int kept = errno;
  busy = 1;
  call.number = atomic_fetch_add(&plan->calls, 1) + 1;
  if (due(call.number, kind)) {
    call.act = plan->what;
    strike(&call);
    if (call.act == KILL && plan->when == BEFORE) die();
    if (call.act == KILL && plan->when == MIDDLE && kind != WRITE) die();
    if (call.act == STALL) wait_micros(plan->micros);
    if (call.act == PAUSE && plan->when == BEFORE) stand_still(call.number);
  }
  busy = 0;
  errno = kept;
  return call;
}

static void note(const struct call *call, int64_t result, int failed) {
  char line[PATH_MAX + 128];
  int fd = (int)system_call(SYS_openat, AT_FDCWD, (long)plan->log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return;
  int length = snprintf(line, sizeof line, "%lld %d %d %s %lld %d %s\n", (long long)call->number,
                        (int)system_call(SYS_getpid, 0, 0, 0, 0), (int)system_call(SYS_gettid, 0, 0, 0, 0),
                        names[call->kind], (long long)result, failed, call->path);
  if (length > 0) system_call(SYS_write, fd, (long)line, length < (int)sizeof line ? length : (int)sizeof line - 1, 0);
  system_call(SYS_close, fd, 0, 0, 0);
}

static int64_t leave(const struct call *call, int64_t result) {
  if (!call->path) return result;
  int kept = errno;
  busy = 1;
  if (plan->log[0]) note(call, result, result < 0 ? kept : 0);
  if (call->act == KILL) die();
  if (call->act == PAUSE && plan->when == AFTER) stand_still(call->number);
  busy = 0;
  errno = kept;
  return result;
}

static int64_t fail(const struct call *call) {
  errno = plan->code;
  leave(call, -1);
  errno = plan->code;
  return -1;
}

/* How much of a write happens: half of it for short ones and those that a kill ends. */
static size_t part(const struct call *call, size_t wanted) {
  int half = call->act == SHORT || (call->act == KILL && plan->when == MIDDLE);
  if (!call->path || !half || wanted < 2) return wanted;
  return wanted >= 8192 ? wanted / 2 & ~(size_t)4095 : wanted / 2;
}

/* The calls. A failing close has closed all the same, as on Linux. */

#define SIMPLE(kind, where, expression)                                                            \
  do {                                                                                             \
    char buffer[PATH_MAX];                                                                         \
    struct call call = enter(kind, where);                                                         \
    if (call.act == FAIL) return fail(&call);                                                      \
    return leave(&call, (expression));                                                             \
  } while (0)

static int opening(int flags) {
  int second = (flags & O_DIRECT) != 0; /* the same file once more, for direct writes: without it they are plain */
  if ((flags & O_CREAT) || ((flags & O_ACCMODE) != O_RDONLY && !second)) return CREATE;
  return flags & O_DIRECTORY ? OPENDIR : OPEN;
}

static int wants_mode(int flags) { return (flags & O_CREAT) || (flags & O_TMPFILE) == O_TMPFILE; }

#define OPENS(name)                                                                                \
  int name(const char *path, int flags, ...) {                                                     \
    REAL(int, #name, const char *, int, ...);                                                      \
    mode_t mode = 0;                                                                               \
    if (wants_mode(flags)) {                                                                       \
      va_list rest;                                                                                \
      va_start(rest, flags);                                                                       \
      mode = va_arg(rest, mode_t);                                                                 \
      va_end(rest);                                                                                \
    }                                                                                              \
    SIMPLE(opening(flags), of_path(buffer, AT_FDCWD, path), real(path, flags, mode));                        \
  }
OPENS(open)
OPENS(open64)

#define OPENS_AT(name)                                                                             \
  int name(int directory, const char *path, int flags, ...) {                                      \
    REAL(int, #name, int, const char *, int, ...);                                                 \
    mode_t mode = 0;                                                                               \
    if (wants_mode(flags)) {                                                                       \
      va_list rest;                                                                                \
      va_start(rest, flags);                                                                       \
      mode = va_arg(rest, mode_t);                                                                 \
      va_end(rest);                                                                                \
    }                                                                                              \
    SIMPLE(opening(flags), of_path(buffer, directory, path), real(directory, path, flags, mode));            \
  }
OPENS_AT(openat)
OPENS_AT(openat64)

int creat(const char *path, mode_t mode) {
  REAL(int, "creat", const char *, mode_t);
  SIMPLE(CREATE, of_path(buffer, AT_FDCWD, path), real(path, mode));
}

#define WRITES(name, arguments, given, size)                                                       \
  do {                                                                                             \
    char buffer[PATH_MAX];                                                                         \
    struct call call = enter(WRITE, of_descriptor(buffer, fd));                                    \
    if (call.act == FAIL) return fail(&call);                                                      \
    if (call.act == ZERO) return leave(&call, 0);                                                  \
    size = part(&call, size);                                                                      \
    return leave(&call, real given);                                                               \
  } while (0)

ssize_t write(int fd, const void *data, size_t size) {
  REAL(ssize_t, "write", int, const void *, size_t);
  WRITES(write, , (fd, data, size), size);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
  REAL(ssize_t, "pwrite", int, const void *, size_t, off_t);
  WRITES(pwrite, , (fd, data, size, offset), size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
  REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
  WRITES(pwrite64, , (fd, data, size, offset), size);
}

/* Of several buffers a part means the first one, or half of it. */
static int first_half(const struct call *call, const struct iovec *parts, int count, struct iovec *half) {
  *half = count ? parts[0] : (struct iovec){0};
  if (part(call, 4) == 4) return 0;
  if (count == 1) half->iov_len = part(call, half->iov_len);
  return 1;
}

#define WRITES_PARTS(given_all, given_half)                                                        \
  do {                                                                                             \
    char buffer[PATH_MAX];                                                                         \
    struct iovec half;                                                                             \
    struct call call = enter(WRITE, of_descriptor(buffer, fd));                                    \
    if (call.act == FAIL) return fail(&call);                                                      \
    if (call.act == ZERO) return leave(&call, 0);                                                  \
    int halved = first_half(&call, parts, count, &half);                                           \
    return leave(&call, halved ? real given_half : real given_all);                                \
  } while (0)

ssize_t writev(int fd, const struct iovec *parts, int count) {
  REAL(ssize_t, "writev", int, const struct iovec *, int);
  WRITES_PARTS((fd, parts, count), (fd, &half, 1));
}

#define VECTORS(name, offset_type)                                                                 \
  ssize_t name(int fd, const struct iovec *parts, int count, offset_type offset) {                 \
    REAL(ssize_t, #name, int, const struct iovec *, int, offset_type);                             \
    WRITES_PARTS((fd, parts, count, offset), (fd, &half, 1, offset));                              \
  }
VECTORS(pwritev, off_t)
VECTORS(pwritev64, off64_t)

#define FLAGGED_VECTORS(name, offset_type)                                                         \
  ssize_t name(int fd, const struct iovec *parts, int count, offset_type offset, int flags) {      \
    REAL(ssize_t, #name, int, const struct iovec *, int, offset_type, int);                        \
    WRITES_PARTS((fd, parts, count, offset, flags), (fd, &half, 1, offset, flags));                \
  }
FLAGGED_VECTORS(pwritev2, off_t)
FLAGGED_VECTORS(pwritev64v2, off64_t)

ssize_t read(int fd, void *data, size_t size) {
  REAL(ssize_t, "read", int, void *, size_t);
  SIMPLE(READ, plan && plan->reads ? of_descriptor(buffer, fd) : NULL, real(fd, data, part(&call, size)));
}

ssize_t pread(int fd, void *data, size_t size, off_t offset) {
  REAL(ssize_t, "pread", int, void *, size_t, off_t);
  SIMPLE(READ, plan && plan->reads ? of_descriptor(buffer, fd) : NULL, real(fd, data, part(&call, size), offset));
}

ssize_t pread64(int fd, void *data, size_t size, off64_t offset) {
  REAL(ssize_t, "pread64", int, void *, size_t, off64_t);
  SIMPLE(READ, plan && plan->reads ? of_descriptor(buffer, fd) : NULL, real(fd, data, part(&call, size), offset));
}

#define READS_PARTS(name, offset_type)                                                             \
  ssize_t name(int fd, const struct iovec *parts, int count, offset_type offset) {                 \
    REAL(ssize_t, #name, int, const struct iovec *, int, offset_type);                             \
    SIMPLE(READ, plan && plan->reads ? of_descriptor(buffer, fd) : NULL, real(fd, parts, count, offset)); \
  }
READS_PARTS(preadv, off_t)
READS_PARTS(preadv64, off64_t)

#define FLAGGED_READS(name, offset_type)                                                           \
  ssize_t name(int fd, const struct iovec *parts, int count, offset_type offset, int flags) {      \
    REAL(ssize_t, #name, int, const struct iovec *, int, offset_type, int);                        \
    SIMPLE(READ, plan && plan->reads ? of_descriptor(buffer, fd) : NULL, real(fd, parts, count, offset, flags)); \
  }
FLAGGED_READS(preadv2, off_t)
FLAGGED_READS(preadv64v2, off64_t)

ssize_t copy_file_range(int from, off64_t *at, int fd, off64_t *to, size_t size, unsigned flags) {
  REAL(ssize_t, "copy_file_range", int, off64_t *, int, off64_t *, size_t, unsigned);
  WRITES(copy_file_range, , (from, at, fd, to, size, flags), size);
}

#define SENDS(name, offset_type)                                                                   \
  ssize_t name(int fd, int from, offset_type *at, size_t size) {                                   \
    REAL(ssize_t, #name, int, int, offset_type *, size_t);                                         \
    WRITES(name, , (fd, from, at, size), size);                                                    \
  }
SENDS(sendfile, off_t)
SENDS(sendfile64, off64_t)

int fsync(int fd) {
  REAL(int, "fsync", int);
  SIMPLE(SYNC, of_descriptor(buffer, fd), real(fd));
}

int fdatasync(int fd) {
  REAL(int, "fdatasync", int);
  SIMPLE(SYNC, of_descriptor(buffer, fd), real(fd));
}

int sync_file_range(int fd, off64_t offset, off64_t size, unsigned flags) {
  REAL(int, "sync_file_range", int, off64_t, off64_t, unsigned);
  SIMPLE(RANGE, of_descriptor(buffer, fd), real(fd, offset, size, flags));
}

/* This one returns its error instead of setting errno. */
#define ALLOCATES(name, offset_type)                                                               \
  int name(int fd, offset_type offset, offset_type size) {                                         \
    REAL(int, #name, int, offset_type, offset_type);                                               \
    char buffer[PATH_MAX];                                                                         \
    struct call call = enter(ALLOCATE, of_descriptor(buffer, fd));                                 \
    if (call.act == FAIL) return fail(&call) ? plan->code : 0;                                     \
    return (int)leave(&call, real(fd, offset, size));                                              \
  }
ALLOCATES(posix_fallocate, off_t)
ALLOCATES(posix_fallocate64, off64_t)

#define FALLOCATES(name, offset_type)                                                              \
  int name(int fd, int mode, offset_type offset, offset_type size) {                               \
    REAL(int, #name, int, int, offset_type, offset_type);                                          \
    SIMPLE(ALLOCATE, of_descriptor(buffer, fd), real(fd, mode, offset, size));                     \
  }
FALLOCATES(fallocate, off_t)
FALLOCATES(fallocate64, off64_t)

#define TRUNCATES(name, offset_type)                                                               \
  int name(int fd, offset_type size) {                                                             \
    REAL(int, #name, int, offset_type);                                                            \
    SIMPLE(TRUNCATE, of_descriptor(buffer, fd), real(fd, size));                                   \
  }
TRUNCATES(ftruncate, off_t)
TRUNCATES(ftruncate64, off64_t)

/* The new name is the one that counts. */

int link(const char *old, const char *path) {
  REAL(int, "link", const char *, const char *);
  SIMPLE(LINK, of_path(buffer, AT_FDCWD, path), real(old, path));
}

int linkat(int from, const char *old, int directory, const char *path, int flags) {
  REAL(int, "linkat", int, const char *, int, const char *, int);
  SIMPLE(LINK, of_path(buffer, directory, path), real(from, old, directory, path, flags));
}

int symlink(const char *old, const char *path) {
  REAL(int, "symlink", const char *, const char *);
  SIMPLE(LINK, of_path(buffer, AT_FDCWD, path), real(old, path));
}

int rename(const char *old, const char *path) {
  REAL(int, "rename", const char *, const char *);
  SIMPLE(RENAME, of_path(buffer, AT_FDCWD, path), real(old, path));
}

int renameat(int from, const char *old, int directory, const char *path) {
  REAL(int, "renameat", int, const char *, int, const char *);
  SIMPLE(RENAME, of_path(buffer, directory, path), real(from, old, directory, path));
}

int renameat2(int from, const char *old, int directory, const char *path, unsigned flags) {
  REAL(int, "renameat2", int, const char *, int, const char *, unsigned);
  SIMPLE(RENAME, of_path(buffer, directory, path), real(from, old, directory, path, flags));
}

int unlink(const char *path) {
  REAL(int, "unlink", const char *);
  SIMPLE(UNLINK, of_path(buffer, AT_FDCWD, path), real(path));
}

int unlinkat(int directory, const char *path, int flags) {
  REAL(int, "unlinkat", int, const char *, int);
  SIMPLE(flags & AT_REMOVEDIR ? RMDIR : UNLINK, of_path(buffer, directory, path), real(directory, path, flags));
}

int rmdir(const char *path) {
  REAL(int, "rmdir", const char *);
  SIMPLE(RMDIR, of_path(buffer, AT_FDCWD, path), real(path));
}

int mkdir(const char *path, mode_t mode) {
  REAL(int, "mkdir", const char *, mode_t);
  SIMPLE(MKDIR, of_path(buffer, AT_FDCWD, path), real(path, mode));
}

int mkdirat(int directory, const char *path, mode_t mode) {
  REAL(int, "mkdirat", int, const char *, mode_t);
  SIMPLE(MKDIR, of_path(buffer, directory, path), real(directory, path, mode));
}

int chmod(const char *path, mode_t mode) {
  REAL(int, "chmod", const char *, mode_t);
  SIMPLE(MODE, of_path(buffer, AT_FDCWD, path), real(path, mode));
}

int fchmod(int fd, mode_t mode) {
  REAL(int, "fchmod", int, mode_t);
  SIMPLE(MODE, of_descriptor(buffer, fd), real(fd, mode));
}

int close(int fd) {
  REAL(int, "close", int);
  char buffer[PATH_MAX];
  const char *path = of_descriptor(buffer, fd);
  int writable = path && (system_call(SYS_fcntl, fd, F_GETFL, 0, 0) & O_ACCMODE) != O_RDONLY;
  struct call call = enter(writable ? CLOSE : RELEASE, path);
  int result = real(fd);
  if (call.act == FAIL) return (int)fail(&call);
  return (int)leave(&call, result);
}

/* Programs that rename or link without a wrapper of the C library. */
long syscall(long number, ...) {
  long a[6];
  va_list rest;
  va_start(rest, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);
  va_end(rest);
  if (!raw) *(void **)(&raw) = dlsym(RTLD_NEXT, "syscall");
  if (number == SYS_renameat2)
    SIMPLE(RENAME, of_path(buffer, (int)a[2], (const char *)a[3]), raw(number, a[0], a[1], a[2], a[3], a[4]));
  if (number == SYS_linkat)
    SIMPLE(LINK, of_path(buffer, (int)a[2], (const char *)a[3]), raw(number, a[0], a[1], a[2], a[3], a[4]));
  return raw(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
