/* Writes, truncations and syncs. */
#include "layer.h"

#include <fnmatch.h>
#include <time.h>

static void copy_old(const char *path, int64_t offset, char *to, int64_t length)
{
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && length > 0) {
        ssize_t got = pread(fd, to, length, offset);
        if (got <= 0)
            break;
        to += got, offset += got, length -= got;
    }
    if (fd < 0 || length)
        give_up("cannot read", path);
    syscall(SYS_close, fd);
}

static struct record *note_content(
    uint32_t kind, const struct stat *status, const char *path, int64_t offset, int64_t length, int64_t old_end)
{
    int64_t old_bytes = old_end > offset ? old_end - offset : 0;
    struct record *record = make(kind, "", "", old_bytes);
    record->node = status->st_ino;
    record->offset = offset;
    record->length = length;
    record->old_size = status->st_size;
    if (old_bytes)
        copy_old(path, offset, data_of(record), old_bytes);
    publish(record);
    return record;
}

struct record *note_resize(const struct stat *status, const char *path, int64_t size)
{
    return note_content(RESIZE, status, path, size, size, status->st_size);
}

static void note_sync(uint32_t kind, uint64_t node, uint64_t upto)
{
    struct record *record = make(kind, "", "", 0);
    record->node = node;
    record->offset = upto;
    record->result = 0;
    publish(record);
}

static int is_lie(const char *path)
{
    char patterns[1000];
    snprintf(patterns, sizeof patterns, "%s", lies ? lies : "");
    const char *below = path[root_length] ? path + root_length + 1 : ".";
    for (char *rest = patterns, *pattern; (pattern = strsep(&rest, ":"));)
        if (*pattern && fnmatch(pattern, below, 0) == 0)
            return 1;
    return 0;
}

static void take_time(void)
{
    static __thread unsigned seed;
    struct timespec now;
    if (!seed) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        seed = now.tv_nsec ^ syscall(SYS_gettid);
    }
    if (sync_us)
        usleep(rand_r(&seed) % sync_us);
}

/* A write with all that the four system calls know; `offset` < 0: where the descriptor stands. */
static ssize_t write_vector(int fd, const struct iovec *vector, int count, off_t offset, int flags)
{
    struct stat status;
    char path[PATH_MAX], own[40];
    if (!is_watched(fd, &status, path) || !S_ISREG(status.st_mode))
        return offset < 0 ? syscall(SYS_writev, fd, vector, count)
                          : syscall(SYS_pwritev2, fd, vector, count, offset, 0L, flags);
    int64_t length = 0;
    for (int number = 0; number < count; number++)
        length += vector[number].iov_len;
    enter();
    fstat(fd, &status); /* now that nobody else writes */
    int mode = fcntl(fd, F_GETFL);
    off_t at = mode & O_APPEND || flags & RWF_APPEND ? status.st_size : offset < 0 ? lseek(fd, 0, SEEK_CUR) : offset;
    int64_t old_end = at + length < status.st_size ? at + length : status.st_size;
    snprintf(own, sizeof own, "/proc/self/fd/%d", fd);
    struct record *record = note_content(WRITE, &status, own, at, length, old_end);
    ssize_t written = offset < 0 ? syscall(SYS_writev, fd, vector, count)
                                 : syscall(SYS_pwritev2, fd, vector, count, offset, 0L, flags);
    note_end(record, written);
    if (written >= 0 && (mode & O_DSYNC || flags & (RWF_DSYNC | RWF_SYNC)) && !is_lie(path))
        note_sync(SYNC, status.st_ino, journal->end);
    leave();
    return written;
}

ssize_t write(int fd, const void *data, size_t length)
{
    struct stat status;
    if (!journal || fstat(fd, &status) || !S_ISREG(status.st_mode)) /* sockets and pipes, often */
        return syscall(SYS_write, fd, data, length);
    struct iovec one = { (void *)data, length };
    return write_vector(fd, &one, 1, -1, 0);
}

ssize_t writev(int fd, const struct iovec *vector, int count)
{
    return write_vector(fd, vector, count, -1, 0);
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset)
{
    struct iovec one = { (void *)data, length };
    if (offset < 0)
        return errno = EINVAL, -1;
    return write_vector(fd, &one, 1, offset, 0);
}

ssize_t pwritev(int fd, const struct iovec *vector, int count, off_t offset)
{
    if (offset < 0)
        return errno = EINVAL, -1;
    return write_vector(fd, vector, count, offset, 0);
}

ssize_t pwritev2(int fd, const struct iovec *vector, int count, off_t offset, int flags)
{
    if (offset == -1 && flags)
        give_up("pwritev2 at the descriptor's own position is not noted", "");
    return write_vector(fd, vector, count, offset, flags);
}

ssize_t pwrite64(int, const void *, size_t, off_t) __attribute__((alias("pwrite")));
ssize_t pwritev64(int, const struct iovec *, int, off_t) __attribute__((alias("pwritev")));
ssize_t pwritev64v2(int, const struct iovec *, int, off_t, int) __attribute__((alias("pwritev2")));

int ftruncate(int fd, off_t size)
{
    struct stat status;
    char path[PATH_MAX], own[40];
    if (!is_watched(fd, &status, path))
        return syscall(SYS_ftruncate, fd, size);
    enter();
    fstat(fd, &status);
    snprintf(own, sizeof own, "/proc/self/fd/%d", fd);
    int result = CHANGE(note_resize(&status, own, size), syscall(SYS_ftruncate, fd, size));
    leave();
    return result;
}

int truncate(const char *path, off_t size)
{
    struct stat status;
    struct place place;
    if (!locate(AT_FDCWD, path, &place) || stat(place.path, &status))
        return syscall(SYS_truncate, path, size);
    enter();
    stat(place.path, &status);
    int result = CHANGE(note_resize(&status, place.path, size), syscall(SYS_truncate, path, size));
    leave();
    return result;
}

int fallocate(int fd, int mode, off_t offset, off_t length)
{
    struct stat status;
    char path[PATH_MAX], own[40];
    if (!is_watched(fd, &status, path))
        return syscall(SYS_fallocate, fd, mode, offset, length);
    if (mode & ~FALLOC_FL_KEEP_SIZE)
        give_up("this way of fallocate is not noted", path);
    enter();
    fstat(fd, &status);
    int64_t size = mode || offset + length < status.st_size ? status.st_size : offset + length;
    snprintf(own, sizeof own, "/proc/self/fd/%d", fd);
    int result = CHANGE(note_resize(&status, own, size), syscall(SYS_fallocate, fd, mode, offset, length));
    leave();
    return result;
}

int posix_fallocate(int fd, off_t offset, off_t length)
{
    int kept = errno, result = fallocate(fd, 0, offset, length) ? errno : 0;
    errno = kept;
    return result;
}

int ftruncate64(int, off_t) __attribute__((alias("ftruncate")));
int truncate64(const char *, off_t) __attribute__((alias("truncate")));
int fallocate64(int, int, off_t, off_t) __attribute__((alias("fallocate")));
int posix_fallocate64(int, off_t, off_t) __attribute__((alias("posix_fallocate")));

int fsync(int fd)
{
    struct stat status;
    char path[PATH_MAX];
    if (!is_watched(fd, &status, path))
        return syscall(SYS_fsync, fd);
    enter();
    uint64_t upto = journal->end; /* what is changed from now on may miss this sync */
    leave();
    take_time();
    if (is_lie(path))
        return 0;
    enter();
    note_sync(SYNC, status.st_ino, upto);
    leave();
    return 0;
}

int fdatasync(int fd)
{
    struct stat status;
    char path[PATH_MAX];
    return is_watched(fd, &status, path) ? fsync(fd) : (int)syscall(SYS_fdatasync, fd);
}

static void sync_all(void)
{
    enter();
    note_sync(SYNC_ALL, 0, journal->end);
    leave();
}

void sync(void)
{
    syscall(SYS_sync);
    if (journal && !lies)
        sync_all();
}

int syncfs(int fd)
{
    struct stat status;
    if (journal && !lies && fstat(fd, &status) == 0 && status.st_dev == device)
        sync_all();
    return syscall(SYS_syncfs, fd);
}
