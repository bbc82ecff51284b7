/* Which descriptors and paths are watched. The kernel knows where a descriptor leads; nothing is remembered. */
#include "layer.h"

static int is_below(const char *path)
{
    return strncmp(path, root, root_length) == 0 && (path[root_length] == '/' || path[root_length] == '\0');
}

static int path_of(int fd, char *path)
{
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0)
        return 0;
    path[length] = '\0';
    return 1;
}

int is_watched(int fd, struct stat *status, char *path)
{
    int kept = errno;
    int found = journal && fstat(fd, status) == 0 && status->st_dev == device
        && (S_ISREG(status->st_mode) || S_ISDIR(status->st_mode)) && path_of(fd, path) && is_below(path);
    errno = kept;
    return found;
}

int locate(int at, const char *given, struct place *place)
{
    char path[PATH_MAX + 40], directory[PATH_MAX];
    struct stat status;
    int kept = errno;
    if (!journal || !given || !*given)
        return 0;
    if (given[0] == '/' || at == AT_FDCWD)
        snprintf(path, sizeof path, "%s", given);
    else
        snprintf(path, sizeof path, "/proc/self/fd/%d/%s", at, given);
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/')
        path[--length] = '\0';
    char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    if (slash == path)
        return 0; /* in the root of everything */
    if (slash)
        *slash = '\0';
    int found = realpath(slash ? path : ".", directory) && is_below(directory) && stat(directory, &status) == 0
        && (size_t)snprintf(place->path, PATH_MAX, "%s/%s", directory, name) < PATH_MAX;
    errno = kept;
    if (!found)
        return 0;
    place->name = place->path + strlen(directory) + 1;
    place->directory = status.st_ino;
    return 1;
}

int look(const char *path, struct stat *status)
{
    int kept = errno, found = lstat(path, status) == 0;
    errno = kept;
    return found;
}
