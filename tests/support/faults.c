/* Preloaded into a process, this library intercepts every call that changes files below one folder.
 *
 *   faults_arm(root, at, code, how)         the at-th call fails with errno `code` (how 0), and every
 *                                           one after it too (1); a write takes half of its bytes and
 *                                           the next call fails (2); code -1 is SIGKILL instead,
 *                                           before the call
 *   faults_journal(path)                    calls that succeed are recorded, with their bytes
 *   faults_mark(n)                          an entry of the caller's own in that journal
 *   faults_calls(), faults_hits()           calls seen, and made to fail, since faults_arm
 *   faults_names()                          a letter for each kind of call that was seen
 *   faults_disarm()
 *
 * In such a process fsync does nothing: the journal decides which bytes reach the disk.
 * It intercepts functions of the C library, not system calls, so code that makes its own system calls
 * is missed. `test_the_journal_alone_makes_the_folder_again` would find that.
 *
 * Journal entries, little-endian: u8 kind, u64 inode, u64 number, u32 length, u32 length, two strings.
 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static long at, calls, hits;
static int code, how, journal = -1;
static char names[256];

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

void faults_arm(const char *path, long nth, int number, int way) {
    snprintf(root, sizeof root, "%s", path);
    at = nth, code = number, how = way, calls = hits = 0;
    memset(names, 0, sizeof names);
}

void faults_disarm(void) {
    root[0] = 0;
    if (journal >= 0) syscall(SYS_close, journal), journal = -1;
}

long faults_calls(void) { return calls; }
long faults_hits(void) { return hits; }

const char *faults_names(void) {
    static char seen[257];
    int n = 0;
    for (int i = 0; i < 256; i++)
        if (names[i]) seen[n++] = (char)i;
    seen[n] = 0;
    return seen;
}

void faults_journal(const char *path) {
    journal = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
}

static void record(char kind, uint64_t inode, uint64_t number, const char *a, size_t na, const void *b,
                   size_t nb) {
    if (journal < 0) return;
    char head[25];
    uint32_t sizes[2] = {(uint32_t)na, (uint32_t)nb};
    head[0] = kind;
    memcpy(head + 1, &inode, 8), memcpy(head + 9, &number, 8), memcpy(head + 17, sizes, 8);
    struct iovec parts[3] = {{head, 25}, {(void *)a, na}, {(void *)b, nb}};
    syscall(SYS_writev, journal, parts, 3);
}

static void record_path(char kind, uint64_t inode, const char *path) {
    record(kind, inode, 0, path, strlen(path), "", 0);
}

void faults_mark(long n) { record('!', 0, (uint64_t)n, "", 0, "", 0); }

/* The absolute form of `path`; 1 when it lies below the root. */
static int below(int folder, const char *path, char *out) {
    if (!root[0] || !path) return 0;
    char base[PATH_MAX] = "";
    if (path[0] != '/') {
        if (folder == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t n = readlink(link, base, sizeof base - 1);
            if (n < 0) return 0;
            base[n] = 0;
        }
    }
    if (snprintf(out, PATH_MAX, "%s%s%s", base, base[0] ? "/" : "", path) >= PATH_MAX) return 0;
    size_t n = strlen(root);
    return strncmp(out, root, n) == 0 && (out[n] == '/' || out[n] == 0);
}

/* Whether an open file lies below the root, and its inode. */
static int open_below(int fd, uint64_t *inode, int *is_folder) {
    if (!root[0] || fd < 0) return 0;
    char link[64], path[PATH_MAX], out[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0 || path[0] != '/') return 0;
    path[n] = 0;
    struct stat status;
    if (!below(AT_FDCWD, path, out) || fstat(fd, &status)) return 0;
    *inode = status.st_ino;
    *is_folder = S_ISDIR(status.st_mode);
    return 1;
}

static uint64_t inode_of(const char *path) {
    struct stat status;
    return lstat(path, &status) ? 0 : status.st_ino;
}

/* Counts a call; 1 when it must fail. */
static int fails(char kind) {
    calls++;
    names[(unsigned char)kind] = 1;
    if (!at || calls < at || (calls > at && how != 1)) return 0;
    hits++;
    if (code == -1) raise(SIGKILL);
    errno = code;
    return 1;
}

static int do_open(int folder, const char *path, int flags, mode_t mode, const char *name) {
    int (*real)(int, const char *, int, ...) = dlsym(RTLD_NEXT, name);
    char full[PATH_MAX];
    int changes = flags & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC);
    if (!(changes || (flags & O_DIRECTORY)) || !below(folder, path, full))
        return real(folder, path, flags, mode);
    int existed = inode_of(full) != 0;
    if (fails(changes ? 'o' : 'd')) return -1;
    int fd = real(folder, path, flags, mode);
    if (fd >= 0 && (flags & O_CREAT) && !existed) record_path('C', inode_of(full), full);
    if (fd >= 0 && (flags & O_TRUNC) && existed) record('F', inode_of(full), 0, "", 0, "", 0);
    return fd;
}

#define MODE(flags)                                                                                  \
    mode_t mode = 0;                                                                                 \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                                                           \
        va_list list;                                                                                \
        va_start(list, flags);                                                                       \
        mode = va_arg(list, mode_t);                                                                 \
        va_end(list);                                                                                \
    }

int open(const char *path, int flags, ...) { MODE(flags) return do_open(AT_FDCWD, path, flags, mode, "openat"); }
int open64(const char *path, int flags, ...) { MODE(flags) return do_open(AT_FDCWD, path, flags, mode, "openat64"); }
int openat(int d, const char *path, int flags, ...) { MODE(flags) return do_open(d, path, flags, mode, "openat"); }
int openat64(int d, const char *path, int flags, ...) { MODE(flags) return do_open(d, path, flags, mode, "openat64"); }

static void wrote(uint64_t inode, off_t offset, const void *data, ssize_t n) {
    if (n > 0) record('W', inode, (uint64_t)offset, "", 0, data, (size_t)n);
}

ssize_t write(int fd, const void *data, size_t n) {
    REAL(write);
    uint64_t inode;
    int folder;
    if (!open_below(fd, &inode, &folder)) return real(fd, data, n);
    if (how == 2 && at && calls + 1 == at && n > 1) {
        n /= 2, calls++, hits++, at++;
    } else if (fails('w')) {
        return -1;
    }
    ssize_t done = real(fd, data, n);
    wrote(inode, lseek(fd, 0, SEEK_CUR) - done, data, done);
    return done;
}

static ssize_t do_pwrite(int fd, const void *data, size_t n, off_t offset, const char *name) {
    ssize_t (*real)(int, const void *, size_t, off_t) = dlsym(RTLD_NEXT, name);
    uint64_t inode;
    int folder;
    if (!open_below(fd, &inode, &folder)) return real(fd, data, n, offset);
    if (fails('w')) return -1;
    ssize_t done = real(fd, data, n, offset);
    wrote(inode, offset, data, done);
    return done;
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t offset) { return do_pwrite(fd, data, n, offset, "pwrite"); }
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t offset) { return do_pwrite(fd, data, n, offset, "pwrite64"); }

/* Record bytes that were written to `fd` by other means. */
static void wrote_inside(int fd, uint64_t inode, off_t offset, ssize_t n) {
    if (n <= 0 || journal < 0) return;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int copy = (int)syscall(SYS_openat, AT_FDCWD, link, O_RDONLY | O_CLOEXEC);
    char *data = malloc((size_t)n);
    if (copy >= 0 && data && syscall(SYS_pread64, copy, data, (size_t)n, offset) == n)
        wrote(inode, offset, data, n);
    free(data);
    if (copy >= 0) syscall(SYS_close, copy);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    uint64_t inode;
    int folder;
    if (!open_below(fd, &inode, &folder)) return real(fd, parts, count);
    if (fails('w')) return -1;
    ssize_t done = real(fd, parts, count);
    wrote_inside(fd, inode, lseek(fd, 0, SEEK_CUR) - done, done);
    return done;
}

static ssize_t do_sendfile(int out, int in, off_t *from, size_t n, const char *name) {
    ssize_t (*real)(int, int, off_t *, size_t) = dlsym(RTLD_NEXT, name);
    uint64_t inode;
    int folder;
    if (!open_below(out, &inode, &folder)) return real(out, in, from, n);
    if (fails('w')) return -1;
    ssize_t done = real(out, in, from, n);
    wrote_inside(out, inode, lseek(out, 0, SEEK_CUR) - done, done);
    return done;
}
ssize_t sendfile(int out, int in, off_t *from, size_t n) { return do_sendfile(out, in, from, n, "sendfile"); }
ssize_t sendfile64(int out, int in, off64_t *from, size_t n) { return do_sendfile(out, in, from, n, "sendfile64"); }

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t n, unsigned flags) {
    REAL(copy_file_range);
    uint64_t inode;
    int folder;
    if (!open_below(out, &inode, &folder)) return real(in, from, out, to, n, flags);
    if (fails('w')) return -1;
    off_t begin = to ? *to : lseek(out, 0, SEEK_CUR);
    ssize_t done = real(in, from, out, to, n, flags);
    wrote_inside(out, inode, begin, done);
    return done;
}

static int do_sync(int fd) {
    uint64_t inode;
    int folder;
    if (!open_below(fd, &inode, &folder)) return 0;
    if (fails('s')) return -1;
    record(folder ? 'D' : 'S', inode, 0, "", 0, "", 0);
    return 0;
}
int fsync(int fd) { return do_sync(fd); }
int fdatasync(int fd) { return do_sync(fd); }

static int do_truncate(int fd, off_t size, const char *name) {
    int (*real)(int, off_t) = dlsym(RTLD_NEXT, name);
    uint64_t inode;
    int folder;
    if (!open_below(fd, &inode, &folder)) return real(fd, size);
    if (fails('t')) return -1;
    int done = real(fd, size);
    if (!done) record('F', inode, (uint64_t)size, "", 0, "", 0);
    return done;
}
int ftruncate(int fd, off_t size) { return do_truncate(fd, size, "ftruncate"); }
int ftruncate64(int fd, off64_t size) { return do_truncate(fd, size, "ftruncate64"); }

static int do_allocate(int fd, off_t offset, off_t n, const char *name) {
    int (*real)(int, off_t, off_t) = dlsym(RTLD_NEXT, name);
    uint64_t inode;
    int folder;
    if (!open_below(fd, &inode, &folder)) return real(fd, offset, n);
    if (fails('a')) return errno;
    int done = real(fd, offset, n);
    struct stat status;
    if (!done && !fstat(fd, &status)) record('F', inode, (uint64_t)status.st_size, "", 0, "", 0);
    return done;
}
int posix_fallocate(int fd, off_t offset, off_t n) { return do_allocate(fd, offset, n, "posix_fallocate"); }
int posix_fallocate64(int fd, off64_t offset, off64_t n) { return do_allocate(fd, offset, n, "posix_fallocate64"); }

static int do_rename(int from_folder, const char *from, int to_folder, const char *to, unsigned flags) {
    char a[PATH_MAX], b[PATH_MAX];
    int seen = below(to_folder, to, b) && below(from_folder, from, a);
    if (seen && fails('r')) return -1;
    int done = (int)syscall(SYS_renameat2, from_folder, from, to_folder, to, flags);
    if (seen && !done) record('R', inode_of(b), 0, a, strlen(a), b, strlen(b));
    return done;
}
int rename(const char *from, const char *to) { return do_rename(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int d, const char *from, int e, const char *to) { return do_rename(d, from, e, to, 0); }
int renameat2(int d, const char *from, int e, const char *to, unsigned flags) { return do_rename(d, from, e, to, flags); }

static int do_remove(int folder, const char *path, int flags) {
    char full[PATH_MAX];
    int seen = below(folder, path, full);
    if (seen && fails(flags & AT_REMOVEDIR ? 'x' : 'u')) return -1;
    int done = (int)syscall(SYS_unlinkat, folder, path, flags);
    if (seen && !done) record_path('U', 0, full);
    return done;
}
int unlink(const char *path) { return do_remove(AT_FDCWD, path, 0); }
int unlinkat(int d, const char *path, int flags) { return do_remove(d, path, flags); }
int rmdir(const char *path) { return do_remove(AT_FDCWD, path, AT_REMOVEDIR); }

static int do_mkdir(int folder, const char *path, mode_t mode) {
    char full[PATH_MAX];
    int seen = below(folder, path, full);
    if (seen && fails('m')) return -1;
    int done = (int)syscall(SYS_mkdirat, folder, path, mode);
    if (seen && !done) record_path('M', inode_of(full), full);
    return done;
}
int mkdir(const char *path, mode_t mode) { return do_mkdir(AT_FDCWD, path, mode); }
int mkdirat(int d, const char *path, mode_t mode) { return do_mkdir(d, path, mode); }

static void *do_mmap(void *where, size_t n, int prot, int flags, int fd, off_t offset, const char *name) {
    void *(*real)(void *, size_t, int, int, int, off_t) = dlsym(RTLD_NEXT, name);
    uint64_t inode;
    int folder;
    if (root[0] && fd >= 0 && open_below(fd, &inode, &folder) && fails('p')) return MAP_FAILED;
    return real(where, n, prot, flags, fd, offset);
}
void *mmap(void *where, size_t n, int prot, int flags, int fd, off_t offset) { return do_mmap(where, n, prot, flags, fd, offset, "mmap"); }
void *mmap64(void *where, size_t n, int prot, int flags, int fd, off64_t offset) { return do_mmap(where, n, prot, flags, fd, offset, "mmap64"); }
