/* Notes what a process writes below one directory, and what it has made durable: see ../__init__.py.
 *
 * Preloaded (LD_PRELOAD) with POWER_HOME=HOME in the environment, HOME a directory that journal.py has prepared, it
 * watches the directory `data` beside HOME, if HOME is there when the process is loaded or changes its directory.
 * HOME/journal gets a record for every change, with what undoes it; a record
 * is there before its change is made, and says afterwards how that went. HOME/graveyard keeps a link to every file that
 * loses a name, and every directory that is removed. A fsync notes that it was asked for and returns after a random
 * time of up to POWER_SYNC_US microseconds; the disk itself is not asked. POWER_LIE, patterns with colons between that
 * match paths below `data`, names the files (and directories, `.` is `data` itself) whose fsync does nothing at all.
 *
 * What could change a watched file in a way that is not noted (a shared mapping, sendfile, a hole that is punched)
 * aborts the process. Changes are made one at a time, under a lock that the dead do not keep.
 */
#ifndef POWER_LAYER_H
#define POWER_LAYER_H
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, MAKE_DIRECTORY, REMOVE, RENAME, WRITE, RESIZE, SYNC, SYNC_ALL };

#define UNDER_WAY INT64_MIN

struct header {
    char magic[8];
    uint64_t end; /* of the records, which begin at HEADER_BYTES */
    uint64_t ready; /* the lock is made */
    pthread_mutex_t lock;
};

struct record { /* followed by name, target name, data; padded to 8 bytes; journal.py reads the same */
    uint32_t size;
    uint32_t kind;
    int64_t result; /* UNDER_WAY, -1, or as the system call returned */
    uint64_t node, directory, target_directory, replaced; /* inode numbers */
    int64_t offset, length, old_size;
    uint32_t name_bytes, target_name_bytes;
    uint64_t data_bytes;
};

struct place { /* a name in a watched directory */
    char path[PATH_MAX];
    const char *name;
    uint64_t directory;
};

#pragma GCC visibility push(hidden) /* what the process has under these names is its own */

/* journal.c */
extern struct header *journal; /* NULL in a process that is not watched */
extern dev_t device;
extern unsigned long sync_us;
extern const char *lies;
extern char root[PATH_MAX], graveyard[PATH_MAX];
extern size_t root_length;
void give_up(const char *what, const char *which) __attribute__((noreturn));
void enter(void);
void leave(void);
/* Return a record with its names; the caller fills it in and publishes it before it makes the change. */
struct record *make(uint32_t kind, const char *name, const char *target_name, uint64_t data_bytes);
char *data_of(struct record *record);
void publish(struct record *record);
int64_t note_end(struct record *record, int64_t result);

/* The record first, then the change: arguments of a function have no order. */
#define CHANGE(RECORD, CALL) ({ struct record *record_ = (RECORD); note_end(record_, CALL); })

/* watched.c */
int is_watched(int fd, struct stat *status, char *path);
/* Find the directory and the name that a path means; 0 where they are none of the watched. */
int locate(int at, const char *given, struct place *place);
int look(const char *path, struct stat *status);

/* contents.c */
struct record *note_resize(const struct stat *status, const char *path, int64_t size);

#pragma GCC visibility pop
#endif
