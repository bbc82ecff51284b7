/* What is not noted, and so must not be done to a watched file. */
#include "layer.h"

static void refuse(int fd, const char *what)
{
    struct stat status;
    char path[PATH_MAX];
    if (is_watched(fd, &status, path))
        give_up(what, path);
}

int symlinkat(const char *content, int at, const char *path)
{
    struct place place;
    if (locate(at, path, &place))
        give_up("symbolic links are not noted", path);
    return syscall(SYS_symlinkat, content, at, path);
}

int symlink(const char *content, const char *path) { return symlinkat(content, AT_FDCWD, path); }

void *mmap(void *address, size_t length, int protection, int flags, int fd, off_t offset)
{
    if (fd >= 0 && flags & MAP_SHARED && protection & PROT_WRITE)
        refuse(fd, "writes through a mapping are not noted");
    return (void *)syscall(SYS_mmap, address, length, protection, flags, fd, offset);
}

void *mmap64(void *, size_t, int, int, int, off_t) __attribute__((alias("mmap")));

ssize_t sendfile(int to, int from, off_t *offset, size_t count)
{
    refuse(to, "sendfile is not noted");
    return syscall(SYS_sendfile, to, from, offset, count);
}

ssize_t sendfile64(int, int, off_t *, size_t) __attribute__((alias("sendfile")));

ssize_t copy_file_range(int from, off_t *from_offset, int to, off_t *to_offset, size_t length, unsigned flags)
{
    refuse(to, "copy_file_range is not noted");
    return syscall(SYS_copy_file_range, from, from_offset, to, to_offset, length, flags);
}

ssize_t splice(int from, off_t *from_offset, int to, off_t *to_offset, size_t length, unsigned flags)
{
    refuse(to, "splice is not noted");
    return syscall(SYS_splice, from, from_offset, to, to_offset, length, flags);
}
