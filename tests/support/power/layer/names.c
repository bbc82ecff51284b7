/* Files and directories that are made, moved and removed. */
#include "layer.h"

#include <dirent.h>
#include <stdarg.h>

static void bury(const struct stat *status, const char *path)
{
    char grave[PATH_MAX + 40];
    snprintf(grave, sizeof grave, "%s/f%llu", graveyard, (unsigned long long)status->st_ino);
    if (!S_ISREG(status->st_mode) || (syscall(SYS_link, path, grave) && errno != EEXIST))
        give_up("cannot keep", path);
}

static struct record *note_name(uint32_t kind, const struct place *place, uint64_t node)
{
    struct record *record = make(kind, place->name, "", 0);
    record->directory = place->directory;
    record->node = node;
    publish(record);
    return record;
}

static int open_at(int at, const char *path, int flags, mode_t mode)
{
    struct place place;
    struct stat status;
    if (!(flags & (O_CREAT | O_TRUNC | (O_TMPFILE & ~O_DIRECTORY))) || !locate(at, path, &place))
        return syscall(SYS_openat, at, path, flags, mode);
    if ((flags & O_TMPFILE) == O_TMPFILE)
        give_up("files without a name are not noted", path);
    struct record *record = NULL;
    enter();
    if (!look(place.path, &status)) {
        if (flags & O_CREAT)
            record = note_name(CREATE, &place, 0);
    } else if (!S_ISREG(status.st_mode) && flags & O_TRUNC) {
        give_up("no file", place.path);
    } else if (flags & O_TRUNC && status.st_size) {
        record = note_resize(&status, place.path, 0);
    }
    int fd = syscall(SYS_openat, at, path, flags, mode);
    if (record) {
        if (fd >= 0 && record->kind == CREATE) {
            fstat(fd, &status);
            record->node = status.st_ino;
        }
        note_end(record, fd < 0 ? -1 : 0);
    }
    leave();
    return fd;
}

static mode_t mode_of(int flags, va_list arguments)
{
    return flags & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY)) ? va_arg(arguments, mode_t) : 0;
}

#define OPEN(NAME)                                                  \
    int NAME(const char *path, int flags, ...)                      \
    {                                                               \
        va_list arguments;                                          \
        va_start(arguments, flags);                                 \
        mode_t mode = mode_of(flags, arguments);                    \
        va_end(arguments);                                          \
        return open_at(AT_FDCWD, path, flags, mode);                \
    }
#define OPEN_AT(NAME)                                               \
    int NAME(int at, const char *path, int flags, ...)              \
    {                                                               \
        va_list arguments;                                          \
        va_start(arguments, flags);                                 \
        mode_t mode = mode_of(flags, arguments);                    \
        va_end(arguments);                                          \
        return open_at(at, path, flags, mode);                      \
    }

OPEN(open)
OPEN(open64)
OPEN_AT(openat)
OPEN_AT(openat64)
int __open_2(const char *path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
int __open64_2(const char *path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
int __openat_2(int at, const char *path, int flags) { return open_at(at, path, flags, 0); }
int __openat64_2(int at, const char *path, int flags) { return open_at(at, path, flags, 0); }
int creat(const char *path, mode_t mode) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

static int is_empty(const char *path)
{
    DIR *directory = opendir(path);
    int names = 0;
    while (directory && readdir(directory))
        names++;
    if (directory)
        closedir(directory);
    return names == 2;
}

static int remove_directory(const struct place *place, const struct stat *status)
{
    char grave[PATH_MAX + 40];
    if (!S_ISDIR(status->st_mode) || !is_empty(place->path))
        return errno = S_ISDIR(status->st_mode) ? ENOTEMPTY : ENOTDIR, -1;
    struct record *record = note_name(REMOVE, place, status->st_ino);
    snprintf(grave, sizeof grave, "%s/d%llu", graveyard, (unsigned long long)status->st_ino);
    return note_end(record, syscall(SYS_rename, place->path, grave));
}

int unlinkat(int at, const char *path, int flags)
{
    struct place place;
    struct stat status;
    if (!locate(at, path, &place))
        return syscall(SYS_unlinkat, at, path, flags);
    int result;
    enter();
    if (!look(place.path, &status) || (!(flags & AT_REMOVEDIR) && S_ISDIR(status.st_mode))) {
        result = syscall(SYS_unlinkat, at, path, flags); /* which says what is wrong */
    } else if (flags & AT_REMOVEDIR) {
        result = remove_directory(&place, &status);
    } else {
        bury(&status, place.path);
        result = CHANGE(note_name(REMOVE, &place, status.st_ino), syscall(SYS_unlinkat, at, path, 0));
    }
    leave();
    return result;
}

int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int remove(const char *path)
{
    struct stat status;
    return look(path, &status) && S_ISDIR(status.st_mode) ? rmdir(path) : unlink(path);
}

int mkdirat(int at, const char *path, mode_t mode)
{
    struct place place;
    struct stat status;
    if (!locate(at, path, &place) || look(place.path, &status))
        return syscall(SYS_mkdirat, at, path, mode);
    enter();
    struct record *record = note_name(MAKE_DIRECTORY, &place, 0);
    int result = syscall(SYS_mkdirat, at, path, mode);
    if (result == 0 && look(place.path, &status))
        record->node = status.st_ino;
    note_end(record, result);
    leave();
    return result;
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int linkat(int from, const char *path, int to, const char *target, int flags)
{
    struct place place;
    struct stat status;
    if (!locate(to, target, &place))
        return syscall(SYS_linkat, from, path, to, target, flags);
    if (fstatat(from, path, &status, AT_SYMLINK_NOFOLLOW))
        return -1;
    enter();
    int result = CHANGE(note_name(CREATE, &place, status.st_ino), syscall(SYS_linkat, from, path, to, target, flags));
    leave();
    return result;
}

int link(const char *path, const char *target) { return linkat(AT_FDCWD, path, AT_FDCWD, target, 0); }

int renameat2(int from, const char *path, int to, const char *target, unsigned flags)
{
    struct place source, place;
    struct stat status, replaced;
    int is_source = locate(from, path, &source), is_target = locate(to, target, &place);
    if (!is_source && !is_target)
        return syscall(SYS_renameat2, from, path, to, target, flags);
    if (!is_source || !is_target)
        give_up("renamed into what is watched, or out of it", path);
    if (flags & ~RENAME_NOREPLACE)
        give_up("this way of rename is not noted", path);
    enter();
    int result, is_there = look(place.path, &replaced);
    if (!look(source.path, &status) || (is_there && (flags || replaced.st_ino == status.st_ino))) {
        result = syscall(SYS_renameat2, from, path, to, target, flags);
    } else {
        if (is_there)
            bury(&replaced, place.path);
        struct record *record = make(RENAME, source.name, place.name, 0);
        record->node = status.st_ino;
        record->directory = source.directory;
        record->target_directory = place.directory;
        record->replaced = is_there ? replaced.st_ino : 0;
        publish(record);
        result = note_end(record, syscall(SYS_renameat2, from, path, to, target, flags));
    }
    leave();
    return result;
}

int rename(const char *path, const char *target) { return renameat2(AT_FDCWD, path, AT_FDCWD, target, 0); }
int renameat(int from, const char *path, int to, const char *target) { return renameat2(from, path, to, target, 0); }
