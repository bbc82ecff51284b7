/* Where changes are noted: a file that all processes of the directory map, one after the other or at once. */
#include "layer.h"

#include <sys/file.h>

#define HEADER_BYTES 4096
#define MAPPED_BYTES ((uint64_t)16 << 30)
#define GROWTH_BYTES ((uint64_t)8 << 20)

struct header *journal;
static int journal_fd = -1;
static uint64_t journal_bytes;
char root[PATH_MAX], graveyard[PATH_MAX];
size_t root_length;
dev_t device;
unsigned long sync_us;
const char *lies;

void give_up(const char *what, const char *which)
{
    char text[PATH_MAX + 200];
    int length = snprintf(text, sizeof text, "power layer: %s: %s\n", what, which);
    syscall(SYS_write, 2, text, length);
    abort();
}

__attribute__((constructor)) static void begin(void)
{
    const char *given = getenv("POWER_HOME");
    char home[PATH_MAX], path[PATH_MAX + 20];
    struct stat status;
    if (!given || !realpath(given, home))
        return; /* a process that is none of the watched ones */
    snprintf(path, sizeof path, "%s/../data", home);
    if (!realpath(path, root) || stat(root, &status))
        give_up("there is no data beside", home);
    root_length = strlen(root);
    device = status.st_dev;
    snprintf(path, sizeof path, "%s/graveyard", home);
    if (!realpath(path, graveyard))
        give_up("no graveyard in", home);
    const char *most = getenv("POWER_SYNC_US");
    sync_us = most ? strtoul(most, NULL, 10) : 0;
    lies = getenv("POWER_LIE");
    if (lies && !*lies)
        lies = NULL;
    snprintf(path, sizeof path, "%s/journal", home);
    journal_fd = syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC);
    if (journal_fd < 0 || flock(journal_fd, LOCK_EX) || fstat(journal_fd, &status))
        give_up("no journal in", home);
    journal_bytes = status.st_size;
    void *mapped = (void *)syscall(
        SYS_mmap, NULL, MAPPED_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, journal_fd, 0);
    if (mapped == MAP_FAILED)
        give_up("the journal cannot be mapped", path);
    struct header *found = mapped;
    if (memcmp(found->magic, "POWER 1", 8) != 0)
        give_up("no journal", path);
    if (!found->ready) {
        pthread_mutexattr_t attributes;
        pthread_mutexattr_init(&attributes);
        pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
        pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
        pthread_mutex_init(&found->lock, &attributes);
        found->ready = 1;
    }
    flock(journal_fd, LOCK_UN);
    journal = found;
}

/* A server that was forked (raftlog.testing) comes to its directory after it was loaded. */
int chdir(const char *path)
{
    int result = syscall(SYS_chdir, path);
    if (result == 0 && !journal)
        begin();
    return result;
}

/* The journal. */

void enter(void)
{
    if (pthread_mutex_lock(&journal->lock) == EOWNERDEAD) /* its record stays under way */
        pthread_mutex_consistent(&journal->lock);
}

void leave(void)
{
    int kept = errno;
    pthread_mutex_unlock(&journal->lock);
    errno = kept;
}

struct record *make(uint32_t kind, const char *name, const char *target_name, uint64_t data_bytes)
{
    size_t names = strlen(name), targets = strlen(target_name);
    uint64_t size = (sizeof(struct record) + names + targets + data_bytes + 7) / 8 * 8;
    if (size > UINT32_MAX || journal->end + size > MAPPED_BYTES)
        give_up("the journal is full", root);
    while (journal->end + size > journal_bytes) {
        struct stat status;
        if (fstat(journal_fd, &status))
            give_up("the journal is gone", root);
        journal_bytes = status.st_size;
        if (journal->end + size > journal_bytes && syscall(SYS_ftruncate, journal_fd, journal_bytes + GROWTH_BYTES))
            give_up("no space for the journal", root);
    }
    struct record *record = (struct record *)((char *)journal + journal->end);
    memset(record, 0, sizeof *record);
    record->size = size;
    record->kind = kind;
    record->result = UNDER_WAY;
    record->name_bytes = names;
    record->target_name_bytes = targets;
    record->data_bytes = data_bytes;
    memcpy((char *)(record + 1), name, names);
    memcpy((char *)(record + 1) + names, target_name, targets);
    return record;
}

char *data_of(struct record *record)
{
    return (char *)(record + 1) + record->name_bytes + record->target_name_bytes;
}

void publish(struct record *record)
{
    __atomic_store_n(&journal->end, journal->end + record->size, __ATOMIC_SEQ_CST);
}

int64_t note_end(struct record *record, int64_t result)
{
    __atomic_store_n(&record->result, result, __ATOMIC_SEQ_CST);
    return result;
}
