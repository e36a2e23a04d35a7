/* nfs_client: a FUSE mount of a folder whose caches behave as those of an NFS client.
 *
 *     nfs_client CLIENT FOLDER MOUNT_POINT CONTROL OPTIONS
 *
 * Every node of a sandbox has one such process, so that nodes do not see each other's changes at
 * once although one kernel serves them all. FOLDER stands for the server's disk. Every system call
 * on it is an operation of the server: it is counted, and it heeds the faults of the server.
 *
 * What is cached, and for how long:
 *
 * - Attributes live for acregmin to acregmax seconds (files) or acdirmin to acdirmax (directories).
 *   The time doubles whenever they are fetched again and found unchanged. st_nlink is one of them.
 * - Names, absent ones included, are valid as long as the attributes of their directory are. If a
 *   directory is fetched again and has changed, all names in it are looked up anew.
 * - With close-to-open consistency (cto), opening a file or a directory fetches its attributes. A
 *   file that has changed loses its cached pages, a directory its names and its listing.
 * - Written data is kept here until close, fsync, `dirty` seconds or 32 MiB a file.
 * - Names lead to inodes and not to paths: what another client has renamed stays reachable under
 *   its old name while that is cached. An inode that another client has removed is ESTALE, unless
 *   this client has it open. What this client itself removes while open becomes a .nfs file.
 * - A change by this client keeps its names valid if nobody else has changed the directory since
 *   it was fetched; the server's lock makes that comparison exact.
 * - link(2) does not fetch the attributes of the file: its st_nlink stays what it was, as on
 *   NFS 4.2. Locks are local. rename(2) with flags is refused.
 *
 * The kernel keeps pages, and names and attributes for as long as they are valid here. So a look-up
 * that arrives early is one that must not be answered from a cache (exclusive creation, the second
 * try after ESTALE), and goes to the server. So is, without cto, a getattr
 * (statx with AT_STATX_FORCE_SYNC) by a thread that does not have the file or directory open: those
 * of the C library between opening and reading are not meant to. A stat after reading, and after a
 * change by this client, can not be told from it. Names that lose their validity early are expired in
 * the kernel: at once when a directory is opened, and by a thread of its own after a change, since
 * the kernel holds the directory's lock then. The kernel's own write-back cache is not used: with
 * it the kernel would never take a file's size from the server.
 *
 * CONTROL holds `faults`, one fault a line, read again whenever it has been replaced:
 *
 *     epoch N                                     files opened under another number are ESTALE
 *     stopped CLIENT                              no operation of that client ends
 *     rule ID CLIENT ERRNO TIMES OPERATIONS PATTERN   these operations on these paths fail
 *     trace                                       write operations down in CLIENT.trace
 *
 * CLIENT may be `*`. ERRNO 0 means a reply that is lost: the deed is done, and done again. ERRNO -2
 * means a link that takes the place of a name that is there. TIMES 0 means always. And it holds
 * `CLIENT.counts`, shared memory with the number of operations: records of a name of 16 bytes and a
 * number of 8. A line of `CLIENT.trace` is an operation and its path.
 */

#define _GNU_SOURCE
#define FUSE_USE_VERSION 312

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <fuse_lowlevel.h>
#include <limits.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

enum { LOST = -1, REPLACES = -2 }; /* in the place of an error */
enum { WIRE_SIZE = 1 << 20, MAX_DIRTY = 32 << 20, NUM_BUCKETS = 1 << 14, MAX_RULES = 64 };
static const double EARLY_S = 0.02; /* the kernel's clock for names is coarser than ours */

enum op {
    LOOKUP, GETATTR, SETATTR, OPEN, CREATE, READ, WRITE, COMMIT, OPENDIR, READDIR, MKDIR, SYMLINK,
    READLINK, MKNOD, LINK, RENAME, UNLINK, RMDIR, STATFS, READ_BYTES, WRITTEN_BYTES, NUM_COUNTS
};
static const char *const OP_NAMES[NUM_COUNTS] = {
    "lookup", "getattr", "setattr", "open", "create", "read", "write", "commit", "opendir",
    "readdir", "mkdir", "symlink", "readlink", "mknod", "link", "rename", "unlink", "rmdir",
    "statfs", "read_bytes", "written_bytes",
};

/* One cached name of a directory; a negative one leads to inode number 0. */
struct name {
    struct name *next;
    dev_t dev;
    ino_t ino;
    double kernel_until; /* how long the kernel answers from its own cache */
    char text[];
};

/* Written data that the server has not seen. Later chunks win over earlier ones. */
struct chunk {
    struct chunk *next;
    off_t offset;
    size_t size, room;
    char data[];
};

struct listing {
    atomic_int holders;
    size_t count, room;
    struct entry { ino_t ino; unsigned char type; char *name; } *entries;
};

struct inode {
    struct inode *next; /* in its bucket */
    dev_t dev;
    ino_t ino;
    int path_fd;
    uint64_t generation;
    uint64_t lookups, holds; /* the kernel's references, and ours; under table_lock */

    pthread_mutex_t lock; /* all below; never held while the server is waited for */
    struct stat attr;
    bool known, gone;
    double until, life, grown;
    _Atomic pid_t opener; /* the thread that is about to read it, having opened it */
    long epoch;

    uint64_t names_version;
    struct name **buckets;
    size_t num_buckets, num_names;
    struct listing *listing;

    int opens, read_fd, write_fd;
    struct chunk *dirty, *dirty_last;
    _Atomic size_t dirty_bytes; /* these two are looked at without the lock, too */
    _Atomic double dirty_since;
    struct timespec written;
    int error; /* of writing back; told once */
    int silly_dir;
    char silly[48];
};

struct file { struct inode *inode; long epoch; };
struct folder { struct inode *inode; struct listing *listing; };

struct rule { long id, times; int error; uint32_t ops; char pattern[PATH_MAX]; };
struct count { char name[16]; _Atomic uint64_t value; };

static struct {
    char *client;
    double acregmin, acregmax, acdirmin, acdirmax, dirty;
    bool cto;
} settings = {.acregmin = 3, .acregmax = 60, .acdirmin = 30, .acdirmax = 60, .dirty = 30, .cto = true};

static struct fuse_session *session;
static struct inode root;
static struct inode *table[NUM_BUCKETS];
static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static _Atomic uint64_t last_generation;
static struct count *counts;
static int control_fd, server_lock_fd;
static bool can_expire;
static _Thread_local fuse_req_t current; /* whom the server is asked for; NULL in our threads */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void *make(size_t size)
{
    void *made = calloc(1, size);
    if (!made) {
        perror("nfs_client");
        abort();
    }
    return made;
}

/* ---- the server: counts, faults, and its lock ---- */

static struct {
    pthread_rwlock_t lock;
    struct stat file;
    long epoch;
    bool stopped, traced;
    int num_rules;
    struct rule rules[MAX_RULES];
} faults = {.lock = PTHREAD_RWLOCK_INITIALIZER};
static _Atomic long hits[1024];

static bool concerns_us(const char *client)
{
    return !strcmp(client, "*") || !strcmp(client, settings.client);
}

static uint32_t parse_ops(char *text)
{
    uint32_t ops = 0;
    char *rest = NULL;
    for (char *word = strtok_r(text, ",", &rest); word; word = strtok_r(NULL, ",", &rest))
        for (int op = 0; op < READ_BYTES; op++)
            if (!strcmp(word, OP_NAMES[op]))
                ops |= 1u << op;
    return ops;
}

static void parse_fault(char *line)
{
    char client[64], ops[256];
    struct rule rule = {0};
    int at = 0;
    if (sscanf(line, "epoch %ld", &faults.epoch) == 1)
        return;
    if (sscanf(line, "stopped %63s", client) == 1) {
        faults.stopped |= concerns_us(client);
        return;
    }
    if (!strcmp(line, "trace\n")) {
        faults.traced = true;
        return;
    }
    if (sscanf(line, "rule %ld %63s %d %ld %255s %n", &rule.id, client, &rule.error, &rule.times,
               ops, &at) < 5 || !at || !concerns_us(client) || faults.num_rules == MAX_RULES)
        return;
    rule.ops = parse_ops(ops);
    snprintf(rule.pattern, sizeof rule.pattern, "%s", line + at);
    rule.pattern[strcspn(rule.pattern, "\n")] = 0;
    faults.rules[faults.num_rules++] = rule;
}

/* Read the faults again if their file is another one. */
static void refresh_faults(void)
{
    struct stat st = {0};
    fstatat(control_fd, "faults", &st, 0);
    pthread_rwlock_rdlock(&faults.lock);
    bool same = st.st_ino == faults.file.st_ino && st.st_mtim.tv_nsec == faults.file.st_mtim.tv_nsec
        && st.st_mtim.tv_sec == faults.file.st_mtim.tv_sec;
    pthread_rwlock_unlock(&faults.lock);
    if (same)
        return;
    pthread_rwlock_wrlock(&faults.lock);
    faults.stopped = faults.traced = false;
    faults.num_rules = 0;
    int fd = openat(control_fd, "faults", O_RDONLY | O_CLOEXEC);
    FILE *stream = fd < 0 ? NULL : fdopen(fd, "r");
    char line[PATH_MAX + 512];
    while (stream && fgets(line, sizeof line, stream))
        parse_fault(line);
    if (stream) {
        fstat(fd, &st); /* that of the file that was read, should it have been replaced since */
        fclose(stream);
    }
    faults.file = st;
    pthread_rwlock_unlock(&faults.lock);
}

static long server_epoch(void)
{
    pthread_rwlock_rdlock(&faults.lock);
    long epoch = faults.epoch;
    pthread_rwlock_unlock(&faults.lock);
    return epoch;
}

/* Tell whether the process that waits for an answer is being killed, which ends any wait. */
static bool is_killed(fuse_req_t req)
{
    if (!req || !fuse_req_interrupted(req))
        return false;
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/%d/status", fuse_req_ctx(req)->pid);
    FILE *stream = fopen(path, "r");
    if (!stream)
        return true;
    bool killed = false;
    unsigned long long mask;
    while (fgets(line, sizeof line, stream))
        if (sscanf(line, "SigPnd: %llx", &mask) == 1 || sscanf(line, "ShdPnd: %llx", &mask) == 1)
            killed |= mask >> 8 & 1; /* SIGKILL is number 9 */
    fclose(stream);
    return killed;
}

/* Tell whether the server is stopped, or (traced) operations are to be written down. */
static bool is_set(const bool *flag)
{
    refresh_faults();
    pthread_rwlock_rdlock(&faults.lock);
    bool set = *flag;
    pthread_rwlock_unlock(&faults.lock);
    return set;
}

/* Write the path of an inode, or of a name in it, relative to the folder. */
static void path_of(const struct inode *where, const char *name, char *path)
{
    char link[64], top[PATH_MAX], full[PATH_MAX];
    ssize_t top_size, size;
    snprintf(link, sizeof link, "/proc/self/fd/%d", root.path_fd);
    top_size = readlink(link, top, sizeof top - 1);
    snprintf(link, sizeof link, "/proc/self/fd/%d", where->path_fd);
    size = readlink(link, full, sizeof full - 1);
    full[size < 0 ? 0 : size] = 0;
    const char *below = size > top_size ? full + top_size + 1 : "";
    if (name)
        snprintf(path, PATH_MAX, "%s%s%s", below, *below ? "/" : "", name);
    else
        snprintf(path, PATH_MAX, "%s", below);
}

/* Return the error that a rule has for an operation, 0 for none, LOST or REPLACES. */
static int fault_of(enum op op, const struct inode *where, const char *name)
{
    int found = 0;
    char path[PATH_MAX] = "";
    pthread_rwlock_rdlock(&faults.lock);
    for (int i = 0; i < faults.num_rules && !found; i++) {
        const struct rule *rule = &faults.rules[i];
        if (!(rule->ops >> op & 1))
            continue;
        if (!*path)
            path_of(where, name, path);
        if (fnmatch(rule->pattern, path, 0))
            continue;
        long hit = atomic_fetch_add(&hits[rule->id % 1024], 1);
        if (!rule->times || hit < rule->times)
            found = rule->error ? rule->error : LOST;
    }
    pthread_rwlock_unlock(&faults.lock);
    return found;
}

static void count(enum op op, uint64_t number)
{
    atomic_fetch_add_explicit(&counts[op].value, number, memory_order_relaxed);
}

static void write_down(enum op op, const struct inode *where, const char *name)
{
    char path[PATH_MAX], file[128];
    path_of(where, name, path);
    snprintf(file, sizeof file, "%s.trace", settings.client);
    int fd = openat(control_fd, file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    dprintf(fd, "%s %s\n", OP_NAMES[op], path);
    close(fd);
}

/* Ask the server for an operation: wait while it is stopped; return an error or what fault_of says. */
static int ask(enum op op, const struct inode *where, const char *name)
{
    count(op, 1);
    if (is_set(&faults.traced))
        write_down(op, where, name);
    while (is_set(&faults.stopped)) {
        if (is_killed(current))
            return EINTR;
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    }
    return fault_of(op, where, name);
}

static pthread_mutex_t change_lock = PTHREAD_MUTEX_INITIALIZER;

static void lock_server(void)
{
    pthread_mutex_lock(&change_lock);
    while (flock(server_lock_fd, LOCK_EX) && errno == EINTR)
        ;
}

static void unlock_server(void)
{
    flock(server_lock_fd, LOCK_UN);
    pthread_mutex_unlock(&change_lock);
}

/* ---- inodes ---- */

static struct inode *inode_of(fuse_ino_t number)
{
    return number == FUSE_ROOT_ID ? &root : (struct inode *)(uintptr_t)number;
}

static fuse_ino_t number_of(const struct inode *inode)
{
    return inode == &root ? FUSE_ROOT_ID : (fuse_ino_t)(uintptr_t)inode;
}

static struct inode **bucket_of(dev_t dev, ino_t ino)
{
    uint64_t key = (uint64_t)ino * 0x9e3779b97f4a7c15ull ^ dev;
    return &table[(key >> 32 ^ key) % NUM_BUCKETS];
}

/* Return the inode with a reference of the kernel more, or NULL if we do not have it. */
static struct inode *find_inode(dev_t dev, ino_t ino)
{
    pthread_mutex_lock(&table_lock);
    struct inode *inode = *bucket_of(dev, ino);
    while (inode && (inode->dev != dev || inode->ino != ino))
        inode = inode->next;
    if (inode)
        inode->lookups++;
    pthread_mutex_unlock(&table_lock);
    return inode;
}

static void init_inode(struct inode *inode, int path_fd, const struct stat *st)
{
    inode->dev = st->st_dev;
    inode->ino = st->st_ino;
    inode->path_fd = path_fd;
    inode->generation = ++last_generation;
    inode->read_fd = inode->write_fd = inode->silly_dir = -1;
    pthread_mutex_init(&inode->lock, NULL);
}

/* Return the inode of an O_PATH descriptor, which is ours then, with one more of the kernel's references. */
static struct inode *take_inode(int path_fd, const struct stat *st)
{
    struct inode *inode = find_inode(st->st_dev, st->st_ino);
    if (inode) {
        close(path_fd);
        return inode;
    }
    struct inode *fresh = make(sizeof *fresh);
    init_inode(fresh, path_fd, st);
    pthread_mutex_lock(&table_lock);
    struct inode **bucket = bucket_of(st->st_dev, st->st_ino);
    for (inode = *bucket; inode; inode = inode->next)
        if (inode->dev == st->st_dev && inode->ino == st->st_ino)
            break;
    if (!inode) {
        fresh->next = *bucket;
        *bucket = inode = fresh;
        fresh = NULL;
    }
    inode->lookups++;
    pthread_mutex_unlock(&table_lock);
    if (fresh) { /* another thread was faster */
        close(path_fd);
        free(fresh);
    }
    return inode;
}

static struct name *detach_names(struct inode *dir);
static void free_names(struct name *names);
static void release_listing(struct listing *listing);

/* Give back references; an inode without any is gone. */
static void put_inode(struct inode *inode, uint64_t lookups, uint64_t holds)
{
    if (inode == &root)
        return;
    pthread_mutex_lock(&table_lock);
    inode->lookups -= lookups;
    inode->holds -= holds;
    bool unused = !inode->lookups && !inode->holds;
    if (unused) {
        struct inode **link = bucket_of(inode->dev, inode->ino);
        while (*link != inode)
            link = &(*link)->next;
        *link = inode->next;
    }
    pthread_mutex_unlock(&table_lock);
    if (!unused)
        return;
    free_names(detach_names(inode));
    release_listing(inode->listing);
    free(inode->buckets);
    close(inode->path_fd);
    pthread_mutex_destroy(&inode->lock);
    free(inode);
}

static bool same_time(struct timespec a, struct timespec b)
{
    return a.tv_sec == b.tv_sec && a.tv_nsec == b.tv_nsec;
}

static bool unchanged(const struct stat *a, const struct stat *b)
{
    return same_time(a->st_mtim, b->st_mtim) && same_time(a->st_ctim, b->st_ctim)
        && a->st_size == b->st_size;
}

/* The four functions below want inode->lock. */

static bool is_fresh(const struct inode *inode)
{
    return inode->known && inode->epoch == server_epoch() && now() < inode->until;
}

static double remaining(const struct inode *inode)
{
    double left = inode->until - now();
    return is_fresh(inode) && left > 0 ? left : 0;
}

/* Keep attributes that the server has just told; return whether they are others than before. */
static bool keep_attr(struct inode *inode, const struct stat *st)
{
    bool dir = S_ISDIR(st->st_mode);
    double shortest = dir ? settings.acdirmin : settings.acregmin;
    double longest = dir ? settings.acdirmax : settings.acregmax;
    double t = now();
    bool changed = !inode->known || !unchanged(&inode->attr, st);
    if (changed) {
        inode->life = shortest;
        inode->grown = t;
    } else if (t >= inode->grown + inode->life) {
        inode->life = 2 * inode->life < longest ? 2 * inode->life : longest;
        inode->grown = t;
    }
    inode->attr = *st;
    inode->known = true;
    inode->epoch = server_epoch();
    inode->until = t + inode->life;
    return changed;
}

/* Return the attributes as this client sees them, with what it has written. */
static struct stat seen_attr(const struct inode *inode)
{
    struct stat st = inode->attr;
    for (const struct chunk *chunk = inode->dirty; chunk; chunk = chunk->next)
        if (chunk->offset + (off_t)chunk->size > st.st_size)
            st.st_size = chunk->offset + (off_t)chunk->size;
    if (inode->dirty)
        st.st_mtim = st.st_ctim = inode->written;
    return st;
}

/* ---- cached names ---- */

static size_t hash(const char *text)
{
    size_t value = 14695981039346656037ull;
    while (*text)
        value = (value ^ (unsigned char)*text++) * 1099511628211ull;
    return value;
}

/* Return where the pointer to a name is, or would be; wants dir->lock. */
static struct name **find_name(struct inode *dir, const char *text)
{
    static struct name *none;
    if (!dir->num_buckets)
        return &none;
    struct name **link = &dir->buckets[hash(text) % dir->num_buckets];
    while (*link && strcmp((*link)->text, text))
        link = &(*link)->next;
    return link;
}

/* Make room for as many names again; wants dir->lock. */
static void grow_names(struct inode *dir)
{
    size_t number = dir->num_buckets ? 4 * dir->num_buckets : 16;
    struct name **buckets = make(number * sizeof *buckets);
    for (size_t i = 0; i < dir->num_buckets; i++)
        for (struct name *name = dir->buckets[i], *next; name; name = next) {
            struct name **link = &buckets[hash(name->text) % number];
            next = name->next;
            name->next = *link;
            *link = name;
        }
    free(dir->buckets);
    dir->buckets = buckets;
    dir->num_buckets = number;
}

/* Remember what a name leads to, NULL for nothing; wants dir->lock. */
static void keep_name(struct inode *dir, const char *text, const struct inode *child, double until)
{
    struct name **link = find_name(dir, text);
    if (!dir->num_buckets || (!*link && dir->num_names >= 2 * dir->num_buckets)) {
        grow_names(dir);
        link = find_name(dir, text);
    }
    if (!*link) {
        *link = make(sizeof **link + strlen(text) + 1);
        strcpy((*link)->text, text);
        dir->num_names++;
    }
    (*link)->dev = child ? child->dev : 0;
    (*link)->ino = child ? child->ino : 0;
    (*link)->kernel_until = until;
}

/* Take all names from a directory: the next look-up of each asks the server. Wants dir->lock. */
static struct name *detach_names(struct inode *dir)
{
    struct name *all = NULL;
    for (size_t i = 0; i < dir->num_buckets; i++)
        for (struct name *name = dir->buckets[i], *next; name; name = next) {
            next = name->next;
            name->next = all;
            all = name;
        }
    if (dir->num_buckets)
        memset(dir->buckets, 0, dir->num_buckets * sizeof *dir->buckets);
    dir->num_names = 0;
    dir->names_version++;
    return all;
}

static void free_names(struct name *names)
{
    for (struct name *next; names; names = next) {
        next = names->next;
        free(names);
    }
}

/* Let the kernel ask for names again that it would answer by itself; waits for the directory's lock. */
static void expire_names(fuse_ino_t dir, struct name *names)
{
    double t = now();
    for (struct name *name = names; name; name = name->next) {
        if (name->kernel_until <= t)
            continue;
        size_t size = strlen(name->text);
        if (can_expire)
            fuse_lowlevel_notify_expire_entry(session, dir, name->text, size, FUSE_LL_EXPIRE_ONLY);
        else
            fuse_lowlevel_notify_inval_entry(session, dir, name->text, size);
    }
    fuse_lowlevel_notify_inval_inode(session, dir, -1, 0);
    free_names(names);
}

static struct expiry {
    struct expiry *next;
    fuse_ino_t dir;
    struct name *names;
    bool awaited, done;
} *expiries;
static pthread_mutex_t expiry_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t expiry_wanted = PTHREAD_COND_INITIALIZER, expiry_done = PTHREAD_COND_INITIALIZER;

/* Have names expired in the kernel, and wait for that, but not for long: what waits for our answer
 * may hold the lock of the directory. */
static void expire_names_later(fuse_ino_t dir, struct name *names, long wait_ms)
{
    struct expiry *expiry = make(sizeof *expiry);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += wait_ms * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    pthread_mutex_lock(&expiry_lock);
    *expiry = (struct expiry){expiries, dir, names, wait_ms > 0, false};
    expiries = expiry;
    pthread_cond_signal(&expiry_wanted);
    if (wait_ms > 0) {
        while (!expiry->done && !pthread_cond_timedwait(&expiry_done, &expiry_lock, &until))
            ;
        if (expiry->done)
            free(expiry);
        else
            expiry->awaited = false;
    }
    pthread_mutex_unlock(&expiry_lock);
}

static void *expire_for_ever(void *unused)
{
    pthread_mutex_lock(&expiry_lock);
    for (;;) {
        while (!expiries)
            pthread_cond_wait(&expiry_wanted, &expiry_lock);
        struct expiry *expiry = expiries;
        expiries = expiry->next;
        pthread_mutex_unlock(&expiry_lock);
        expire_names(expiry->dir, expiry->names);
        pthread_mutex_lock(&expiry_lock);
        expiry->done = true;
        if (expiry->awaited)
            pthread_cond_broadcast(&expiry_done);
        else
            free(expiry);
    }
    return unused;
}

/* Drop the listing of a directory; wants dir->lock. */
static void drop_listing(struct inode *dir)
{
    release_listing(dir->listing);
    dir->listing = NULL;
}

/* ---- asking the server for attributes ---- */

/* Fetch the attributes of an inode; `op` says what for. Names and listing of a directory that has
 * changed are dropped, before this returns; by the kernel, too, for OPENDIR, for which it holds no
 * lock, and as far as `wait_ms` goes. */
static int fetch_attr(struct inode *inode, enum op op, long wait_ms, bool *changed)
{
    struct stat st;
    int error = ask(op, inode, NULL);
    if (error > 0)
        return error;
    if (fstatat(inode->path_fd, "", &st, AT_EMPTY_PATH))
        return errno;
    struct name *names = NULL;
    pthread_mutex_lock(&inode->lock);
    if (!st.st_nlink && !inode->opens) {
        inode->known = false;
        inode->gone = true;
        pthread_mutex_unlock(&inode->lock);
        return ESTALE;
    }
    bool restarted = inode->epoch != server_epoch();
    *changed = keep_attr(inode, &st);
    if (S_ISDIR(st.st_mode) && (*changed || restarted)) {
        names = detach_names(inode);
        drop_listing(inode);
    }
    pthread_mutex_unlock(&inode->lock);
    if (op == OPENDIR)
        expire_names(number_of(inode), names);
    else if (names)
        expire_names_later(number_of(inode), names, wait_ms);
    else if (wait_ms)
        fuse_lowlevel_notify_inval_inode(session, number_of(inode), -1, 0);
    return 0;
}

/* Fetch the attributes of an inode if those that are cached have had their time. */
static int freshen(struct inode *inode)
{
    bool changed;
    pthread_mutex_lock(&inode->lock);
    bool fresh = is_fresh(inode);
    pthread_mutex_unlock(&inode->lock);
    return fresh ? 0 : fetch_attr(inode, GETATTR, 0, &changed);
}

/* ---- written data ---- */

/* Keep written data until it is sent; wants inode->lock. */
static void keep_written(struct inode *inode, const char *data, size_t size, off_t offset)
{
    struct chunk *last = inode->dirty_last;
    if (!last || last->offset + (off_t)last->size != offset || last->room - last->size < size) {
        size_t room = size < 65536 ? 65536 : size;
        if (last && last->offset + (off_t)last->size == offset && room < 2 * last->room)
            room = 2 * last->room < 4 * WIRE_SIZE ? 2 * last->room : room;
        struct chunk *chunk = malloc(sizeof *chunk + room);
        if (!chunk)
            abort();
        *chunk = (struct chunk){.offset = offset, .room = room};
        if (last)
            last->next = chunk;
        else
            inode->dirty = chunk;
        inode->dirty_last = last = chunk;
    }
    memcpy(last->data + last->size, data, size);
    last->size += size;
    if (!inode->dirty_bytes)
        inode->dirty_since = now();
    inode->dirty_bytes += size;
    clock_gettime(CLOCK_REALTIME, &inode->written);
}

/* Write one chunk to the disk of the server; return an error or 0. */
static int send_chunk(int fd, const struct chunk *chunk)
{
    for (size_t done = 0; done < chunk->size;) {
        ssize_t written = pwrite(fd, chunk->data + done, chunk->size - done, chunk->offset + done);
        if (written < 0)
            return errno;
        done += written;
    }
    return 0;
}

/* Send what has been written. An error is kept for close and fsync; the data is lost then. */
static void send_written(struct inode *inode)
{
    pthread_mutex_lock(&inode->lock);
    bool clean = !inode->dirty;
    pthread_mutex_unlock(&inode->lock);
    if (clean)
        return;
    int error = ask(WRITE, inode, NULL);
    uint64_t operations = 0;
    pthread_mutex_lock(&inode->lock);
    for (struct chunk *chunk = inode->dirty, *next; chunk; chunk = next) {
        next = chunk->next;
        if (error <= 0)
            error = send_chunk(inode->write_fd, chunk);
        operations += (chunk->size + WIRE_SIZE - 1) / WIRE_SIZE;
        count(WRITTEN_BYTES, chunk->size);
        free(chunk);
    }
    inode->dirty = inode->dirty_last = NULL;
    inode->dirty_bytes = 0;
    if (error > 0)
        inode->error = error;
    struct stat st;
    if (!fstatat(inode->path_fd, "", &st, AT_EMPTY_PATH))
        keep_attr(inode, &st);
    pthread_mutex_unlock(&inode->lock);
    if (operations > 1) { /* a single one is written to the disk at once, as by a kernel */
        count(WRITE, operations - 1);
        count(COMMIT, 1);
    }
    fuse_lowlevel_notify_inval_inode(session, number_of(inode), -1, 0);
}

static int take_error(struct inode *inode)
{
    pthread_mutex_lock(&inode->lock);
    int error = inode->error;
    inode->error = 0;
    pthread_mutex_unlock(&inode->lock);
    return error;
}

/* Drop what a restart of the server has cost. */
static void drop_written(struct inode *inode)
{
    pthread_mutex_lock(&inode->lock);
    for (struct chunk *chunk = inode->dirty, *next; chunk; chunk = next) {
        next = chunk->next;
        free(chunk);
    }
    inode->dirty = inode->dirty_last = NULL;
    inode->dirty_bytes = 0;
    pthread_mutex_unlock(&inode->lock);
}

/* Send what is older than the setting says, as a kernel does by itself. */
static void *send_for_ever(void *unused)
{
    for (;;) {
        nanosleep(&(struct timespec){.tv_nsec = 500000000}, NULL);
        struct inode *due[256];
        int number = 0;
        double t = now();
        pthread_mutex_lock(&table_lock);
        for (int i = 0; i < NUM_BUCKETS; i++)
            for (struct inode *inode = table[i]; inode && number < 256; inode = inode->next)
                if (inode->dirty_bytes && t > inode->dirty_since + settings.dirty) {
                    inode->holds++;
                    due[number++] = inode;
                }
        pthread_mutex_unlock(&table_lock);
        for (int i = 0; i < number; i++) {
            send_written(due[i]);
            put_inode(due[i], 0, 1);
        }
    }
    return unused;
}

/* ---- requests of the kernel ---- */

/* Answer with an inode, whose reference is the kernel's from now on. Wants no lock. */
static void reply_entry(fuse_req_t req, struct inode *inode, double entry_timeout)
{
    pthread_mutex_lock(&inode->lock);
    struct fuse_entry_param entry = {
        .ino = number_of(inode), .generation = inode->generation, .attr = seen_attr(inode),
        .attr_timeout = remaining(inode), .entry_timeout = entry_timeout,
    };
    pthread_mutex_unlock(&inode->lock);
    if (fuse_reply_entry(req, &entry))
        put_inode(inode, 1, 0);
}

static void reply_absent(fuse_req_t req, double entry_timeout)
{
    fuse_reply_entry(req, &(struct fuse_entry_param){.entry_timeout = entry_timeout});
}

/* Look a name up at the server; *child is NULL where there is nothing. */
static int look_up(struct inode *dir, const char *name, struct inode **child)
{
    struct stat st;
    *child = NULL;
    int error = ask(LOOKUP, dir, name);
    if (error > 0)
        return error;
    int fd = openat(dir->path_fd, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT) {
        bool gone = !fstatat(dir->path_fd, "", &st, AT_EMPTY_PATH) && !st.st_nlink;
        return gone ? ESTALE : 0;
    }
    if (fd < 0)
        return errno;
    if (fstatat(fd, "", &st, AT_EMPTY_PATH)) {
        error = errno;
        close(fd);
        return error;
    }
    *child = take_inode(fd, &st);
    pthread_mutex_lock(&(*child)->lock);
    struct name *names = NULL;
    bool restarted = (*child)->epoch != server_epoch();
    bool known = (*child)->known;
    if ((keep_attr(*child, &st) || restarted) && known && S_ISDIR(st.st_mode)) {
        names = detach_names(*child);
        drop_listing(*child);
    }
    pthread_mutex_unlock(&(*child)->lock);
    if (names)
        expire_names_later(number_of(*child), names, 0);
    return 0;
}

/* Answer a look-up from the cached names; return whether that could be done. */
static bool reply_cached(fuse_req_t req, struct inode *dir, const char *text)
{
    pthread_mutex_lock(&dir->lock);
    struct name *name = *find_name(dir, text);
    double left = remaining(dir);
    struct inode *child = NULL;
    bool usable = name && (!name->ino || (child = find_inode(name->dev, name->ino)));
    if (child && child->gone) {
        put_inode(child, 1, 0);
        usable = false;
    }
    if (usable)
        name->kernel_until = now() + left;
    pthread_mutex_unlock(&dir->lock);
    if (!usable)
        return false;
    if (child)
        reply_entry(req, child, left);
    else
        reply_absent(req, left);
    return true;
}

static void do_lookup(fuse_req_t req, fuse_ino_t parent, const char *text)
{
    struct inode *dir = inode_of(parent), *child;
    current = req;
    pthread_mutex_lock(&dir->lock);
    struct name *name = *find_name(dir, text);
    bool must_ask = name && is_fresh(dir) && now() < name->kernel_until - EARLY_S;
    pthread_mutex_unlock(&dir->lock);
    int error = freshen(dir);
    if (error) {
        fuse_reply_err(req, error);
        return;
    }
    if (!must_ask && reply_cached(req, dir, text))
        return;
    pthread_mutex_lock(&dir->lock);
    uint64_t version = dir->names_version;
    pthread_mutex_unlock(&dir->lock);
    error = look_up(dir, text, &child);
    if (error) {
        fuse_reply_err(req, error);
        return;
    }
    pthread_mutex_lock(&dir->lock);
    double left = version == dir->names_version ? remaining(dir) : 0;
    if (version == dir->names_version)
        keep_name(dir, text, child, now() + left);
    pthread_mutex_unlock(&dir->lock);
    if (child)
        reply_entry(req, child, left);
    else
        reply_absent(req, left);
}

static void do_forget(fuse_req_t req, fuse_ino_t number, uint64_t lookups)
{
    put_inode(inode_of(number), lookups, 0);
    fuse_reply_none(req);
}

static void do_forget_multi(fuse_req_t req, size_t number, struct fuse_forget_data *forgets)
{
    for (size_t i = 0; i < number; i++)
        put_inode(inode_of(forgets[i].ino), forgets[i].nlookup, 0);
    fuse_reply_none(req);
}

static void reply_attr(fuse_req_t req, struct inode *inode)
{
    pthread_mutex_lock(&inode->lock);
    struct stat st = seen_attr(inode);
    double left = remaining(inode);
    pthread_mutex_unlock(&inode->lock);
    fuse_reply_attr(req, &st, left);
}

static void do_getattr(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *fi)
{
    struct inode *inode = inode_of(number);
    (void)fi;
    current = req;
    bool changed;
    pthread_mutex_lock(&inode->lock);
    bool forced = !settings.cto && is_fresh(inode) && inode->opener != fuse_req_ctx(req)->pid;
    pthread_mutex_unlock(&inode->lock);
    int error = forced ? fetch_attr(inode, GETATTR, 100, &changed) : freshen(inode);
    if (error)
        fuse_reply_err(req, error);
    else
        reply_attr(req, inode);
}

static int change_attr(struct inode *inode, const struct stat *st, int wanted)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", inode->path_fd);
    if (wanted & FUSE_SET_ATTR_MODE && chmod(path, st->st_mode))
        return errno;
    if (wanted & (FUSE_SET_ATTR_UID | FUSE_SET_ATTR_GID)
        && fchownat(inode->path_fd, "", wanted & FUSE_SET_ATTR_UID ? st->st_uid : (uid_t)-1,
                    wanted & FUSE_SET_ATTR_GID ? st->st_gid : (gid_t)-1, AT_EMPTY_PATH))
        return errno;
    if (wanted & FUSE_SET_ATTR_SIZE && truncate(path, st->st_size))
        return errno;
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_nsec = UTIME_OMIT}};
    if (wanted & FUSE_SET_ATTR_ATIME)
        times[0] = st->st_atim;
    if (wanted & FUSE_SET_ATTR_ATIME_NOW)
        times[0].tv_nsec = UTIME_NOW;
    if (wanted & FUSE_SET_ATTR_MTIME)
        times[1] = st->st_mtim;
    if (wanted & FUSE_SET_ATTR_MTIME_NOW)
        times[1].tv_nsec = UTIME_NOW;
    if (times[0].tv_nsec == UTIME_OMIT && times[1].tv_nsec == UTIME_OMIT)
        return 0;
    return utimensat(inode->path_fd, "", times, AT_EMPTY_PATH) ? errno : 0;
}

static void do_setattr(fuse_req_t req, fuse_ino_t number, struct stat *st, int wanted,
                       struct fuse_file_info *fi)
{
    struct inode *inode = inode_of(number);
    struct stat after;
    (void)fi;
    current = req;
    send_written(inode);
    int error = ask(SETATTR, inode, NULL);
    if (error <= 0)
        error = change_attr(inode, st, wanted);
    if (error <= 0 && fstatat(inode->path_fd, "", &after, AT_EMPTY_PATH))
        error = errno;
    if (error > 0) {
        fuse_reply_err(req, error);
        return;
    }
    pthread_mutex_lock(&inode->lock);
    keep_attr(inode, &after);
    pthread_mutex_unlock(&inode->lock);
    reply_attr(req, inode);
}

static void do_readlink(fuse_req_t req, fuse_ino_t number)
{
    struct inode *inode = inode_of(number);
    char target[PATH_MAX + 1];
    current = req;
    int error = ask(READLINK, inode, NULL);
    ssize_t size = error > 0 ? -1 : readlinkat(inode->path_fd, "", target, PATH_MAX);
    if (size < 0) {
        fuse_reply_err(req, error > 0 ? error : errno);
        return;
    }
    target[size] = 0;
    fuse_reply_readlink(req, target);
}

/* ---- changes of directories ---- */

/* The server's reply to a change tells how the directory was right before it. The server is
 * locked in between, so that a change by another client is in one of the two. */
static struct stat begin_change(struct inode *dir)
{
    struct stat before = {0};
    fstatat(dir->path_fd, "", &before, AT_EMPTY_PATH);
    return before;
}

static void end_change(struct inode *dir, const struct stat *before)
{
    struct stat after;
    struct name *names = NULL;
    if (fstatat(dir->path_fd, "", &after, AT_EMPTY_PATH))
        return;
    pthread_mutex_lock(&dir->lock);
    if (!dir->known || !unchanged(&dir->attr, before))
        names = detach_names(dir);
    keep_attr(dir, &after);
    drop_listing(dir);
    pthread_mutex_unlock(&dir->lock);
    if (names)
        expire_names_later(number_of(dir), names, 0);
}

static void own_as_caller(fuse_req_t req, struct inode *dir, int dir_fd, const char *name)
{
    const struct fuse_ctx *caller = fuse_req_ctx(req);
    struct stat parent = {0};
    fstatat(dir->path_fd, "", &parent, AT_EMPTY_PATH);
    gid_t group = parent.st_mode & S_ISGID ? (gid_t)-1 : caller->gid;
    if (fchownat(dir_fd, name, caller->uid, group, AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH))
        perror(name);
}

/* Remember and answer with what has just been made. */
static void reply_made(fuse_req_t req, struct inode *dir, const char *name)
{
    struct stat st;
    int fd = openat(dir->path_fd, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 || fstatat(fd, "", &st, AT_EMPTY_PATH)) {
        fuse_reply_err(req, errno);
        if (fd >= 0)
            close(fd);
        return;
    }
    struct inode *child = take_inode(fd, &st);
    pthread_mutex_lock(&child->lock);
    keep_attr(child, &st);
    pthread_mutex_unlock(&child->lock);
    pthread_mutex_lock(&dir->lock);
    double left = remaining(dir);
    keep_name(dir, name, child, now() + left);
    pthread_mutex_unlock(&dir->lock);
    reply_entry(req, child, left);
}

struct making { enum op op; mode_t mode; dev_t device; const char *target; };

static int make_entry(struct inode *dir, const char *name, const struct making *making)
{
    if (making->op == MKDIR)
        return mkdirat(dir->path_fd, name, making->mode);
    if (making->op == SYMLINK)
        return symlinkat(making->target, dir->path_fd, name);
    return mknodat(dir->path_fd, name, making->mode, making->device);
}

static void do_make(fuse_req_t req, fuse_ino_t parent, const char *name, struct making making)
{
    struct inode *dir = inode_of(parent);
    current = req;
    int error = ask(making.op, dir, name);
    if (error <= 0) {
        lock_server();
        struct stat before = begin_change(dir);
        int failed = make_entry(dir, name, &making);
        if (!failed)
            own_as_caller(req, dir, dir->path_fd, name);
        if (error < 0)
            failed = make_entry(dir, name, &making);
        error = failed ? errno : 0;
        end_change(dir, &before);
        unlock_server();
    }
    if (error)
        fuse_reply_err(req, error);
    else
        reply_made(req, dir, name);
}

static void do_mkdir(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode)
{
    do_make(req, parent, name, (struct making){.op = MKDIR, .mode = mode});
}

static void do_symlink(fuse_req_t req, const char *target, fuse_ino_t parent, const char *name)
{
    do_make(req, parent, name, (struct making){.op = SYMLINK, .target = target});
}

static void do_mknod(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode, dev_t device)
{
    do_make(req, parent, name, (struct making){.op = MKNOD, .mode = mode, .device = device});
}

static void do_link(fuse_req_t req, fuse_ino_t number, fuse_ino_t parent, const char *name)
{
    struct inode *inode = inode_of(number), *dir = inode_of(parent);
    current = req;
    int error = ask(LINK, dir, name);
    if (error <= 0) {
        lock_server();
        struct stat before = begin_change(dir);
        if (error == REPLACES)
            unlinkat(dir->path_fd, name, 0);
        int failed = linkat(inode->path_fd, "", dir->path_fd, name, AT_EMPTY_PATH);
        if (error == LOST)
            failed = linkat(inode->path_fd, "", dir->path_fd, name, AT_EMPTY_PATH);
        error = failed ? errno : 0;
        end_change(dir, &before);
        unlock_server();
    }
    if (error) {
        fuse_reply_err(req, error);
        return;
    }
    pthread_mutex_lock(&dir->lock);
    double left = remaining(dir);
    keep_name(dir, name, inode, now() + left);
    pthread_mutex_unlock(&dir->lock);
    pthread_mutex_lock(&table_lock);
    inode->lookups++;
    pthread_mutex_unlock(&table_lock);
    reply_entry(req, inode, left);
}

/* Rename a file that this client has open, in place of its removal; the server is locked. */
static bool put_aside(struct inode *dir, const char *name)
{
    struct stat st;
    bool done = false;
    if (fstatat(dir->path_fd, name, &st, AT_SYMLINK_NOFOLLOW))
        return false;
    struct inode *inode = find_inode(st.st_dev, st.st_ino);
    if (!inode)
        return false;
    pthread_mutex_lock(&inode->lock);
    if (inode->opens && inode->silly_dir < 0 && st.st_nlink == 1) {
        char aside[sizeof inode->silly];
        snprintf(aside, sizeof aside, ".nfs%016llx%08llx", (unsigned long long)inode->ino,
                 (unsigned long long)++last_generation);
        if (!renameat(dir->path_fd, name, dir->path_fd, aside)) {
            inode->silly_dir = fcntl(dir->path_fd, F_DUPFD_CLOEXEC, 0);
            strcpy(inode->silly, aside);
            done = true;
        }
    }
    inode->until = 0; /* st_nlink and st_ctime are others now */
    pthread_mutex_unlock(&inode->lock);
    put_inode(inode, 1, 0);
    return done;
}

static void do_remove(fuse_req_t req, fuse_ino_t parent, const char *name, enum op op)
{
    struct inode *dir = inode_of(parent);
    int flags = op == RMDIR ? AT_REMOVEDIR : 0;
    current = req;
    int error = ask(op, dir, name);
    if (error <= 0) {
        lock_server();
        struct stat before = begin_change(dir);
        int failed = op == UNLINK && put_aside(dir, name) ? 0 : unlinkat(dir->path_fd, name, flags);
        if (error < 0)
            failed = unlinkat(dir->path_fd, name, flags);
        error = failed ? errno : 0;
        end_change(dir, &before);
        unlock_server();
    }
    if (!error) {
        pthread_mutex_lock(&dir->lock);
        keep_name(dir, name, NULL, 0);
        pthread_mutex_unlock(&dir->lock);
    }
    fuse_reply_err(req, error);
}

static void do_unlink(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    do_remove(req, parent, name, UNLINK);
}

static void do_rmdir(fuse_req_t req, fuse_ino_t parent, const char *name)
{
    do_remove(req, parent, name, RMDIR);
}

/* Move what is known of a name to another one. */
static void move_name(struct inode *from, const char *old, struct inode *to, const char *new)
{
    struct name copy = {0};
    pthread_mutex_lock(&from->lock);
    struct name *name = *find_name(from, old);
    if (name)
        copy = *name;
    keep_name(from, old, NULL, 0);
    pthread_mutex_unlock(&from->lock);
    pthread_mutex_lock(&to->lock);
    struct name **link = find_name(to, new);
    if (copy.ino) {
        keep_name(to, new, &(struct inode){.dev = copy.dev, .ino = copy.ino}, copy.kernel_until);
    } else if (*link) {
        struct name *stale = *link;
        *link = stale->next;
        to->num_names--;
        free(stale);
    }
    pthread_mutex_unlock(&to->lock);
}

static void do_rename(fuse_req_t req, fuse_ino_t parent, const char *old, fuse_ino_t new_parent,
                      const char *new, unsigned int flags)
{
    struct inode *from = inode_of(parent), *to = inode_of(new_parent);
    current = req;
    int error = flags ? EINVAL : ask(RENAME, to, new);
    if (error <= 0) {
        lock_server();
        struct stat before = begin_change(from), other = begin_change(to), source, target;
        bool same = !fstatat(from->path_fd, old, &source, AT_SYMLINK_NOFOLLOW)
            && !fstatat(to->path_fd, new, &target, AT_SYMLINK_NOFOLLOW)
            && source.st_ino == target.st_ino;
        if (!same)
            put_aside(to, new);
        int failed = renameat(from->path_fd, old, to->path_fd, new);
        if (error < 0)
            failed = renameat(from->path_fd, old, to->path_fd, new);
        error = failed ? errno : 0;
        end_change(from, &before);
        if (to != from)
            end_change(to, &other);
        unlock_server();
    }
    if (!error)
        move_name(from, old, to, new);
    fuse_reply_err(req, error);
}

/* ---- open files ---- */

static bool writes(int flags)
{
    return (flags & O_ACCMODE) != O_RDONLY;
}

/* Open the file of an inode at the server as far as it is not; count an opener. Wants inode->lock. */
static int add_opener(struct inode *inode, int flags)
{
    char path[64];
    int *fd = writes(flags) ? &inode->write_fd : &inode->read_fd;
    snprintf(path, sizeof path, "/proc/self/fd/%d", inode->path_fd);
    if (*fd < 0)
        *fd = open(path, (writes(flags) ? O_RDWR : O_RDONLY) | O_CLOEXEC);
    if (*fd < 0)
        return errno;
    inode->opens++;
    return 0;
}

static void give_handle(struct inode *inode, struct fuse_file_info *fi)
{
    struct file *file = make(sizeof *file);
    *file = (struct file){inode, server_epoch()};
    fi->fh = (uintptr_t)file;
}

static struct file *file_of(const struct fuse_file_info *fi)
{
    return (struct file *)(uintptr_t)fi->fh;
}

static void remove_opener(struct inode *inode)
{
    int silly_dir = -1;
    char silly[sizeof inode->silly];
    pthread_mutex_lock(&inode->lock);
    if (!--inode->opens) {
        if (inode->read_fd >= 0)
            close(inode->read_fd);
        if (inode->write_fd >= 0)
            close(inode->write_fd);
        inode->read_fd = inode->write_fd = -1;
        silly_dir = inode->silly_dir;
        inode->silly_dir = -1;
        memcpy(silly, inode->silly, sizeof silly);
    }
    pthread_mutex_unlock(&inode->lock);
    if (silly_dir >= 0) {
        count(UNLINK, 1);
        unlinkat(silly_dir, silly, 0);
        close(silly_dir);
    }
}

static void do_open(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *fi)
{
    struct inode *inode = inode_of(number);
    bool changed = false;
    current = req;
    int error = settings.cto ? fetch_attr(inode, OPEN, 0, &changed) : freshen(inode);
    if (!error && writes(fi->flags) && fault_of(WRITE, inode, NULL) == EROFS)
        error = EROFS;
    if (!error) {
        pthread_mutex_lock(&inode->lock);
        error = add_opener(inode, fi->flags);
        pthread_mutex_unlock(&inode->lock);
    }
    if (error) {
        fuse_reply_err(req, error);
        return;
    }
    if (changed)
        fuse_lowlevel_notify_inval_inode(session, number, -1, 0);
    give_handle(inode, fi);
    inode->opener = fuse_req_ctx(req)->pid;
    fi->keep_cache = !changed;
    if (fuse_reply_open(req, fi)) {
        remove_opener(inode);
        free(file_of(fi));
    }
}

/* Create or open a file in a directory; return a descriptor or -1. */
static int create_at(struct inode *dir, const char *name, mode_t mode, int flags, bool *created)
{
    int plain = O_RDWR | O_NOFOLLOW | O_CLOEXEC;
    int fd = openat(dir->path_fd, name, plain | O_CREAT | O_EXCL, mode);
    *created = fd >= 0;
    if (fd < 0 && errno == EEXIST && !(flags & O_EXCL))
        fd = openat(dir->path_fd, name, plain | (flags & O_TRUNC));
    return fd;
}

static void do_create(fuse_req_t req, fuse_ino_t parent, const char *name, mode_t mode,
                      struct fuse_file_info *fi)
{
    struct inode *dir = inode_of(parent);
    bool created = false;
    struct stat st;
    char path[64];
    int fd = -1, path_fd = -1;
    current = req;
    int error = ask(CREATE, dir, name);
    if (error <= 0) {
        lock_server();
        struct stat before = begin_change(dir);
        fd = create_at(dir, name, mode, fi->flags, &created);
        error = fd < 0 ? errno : 0;
        if (created)
            own_as_caller(req, dir, fd, "");
        end_change(dir, &before);
        unlock_server();
    }
    if (!error) {
        snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
        path_fd = open(path, O_PATH | O_CLOEXEC);
        if (path_fd < 0 || fstat(fd, &st))
            error = errno;
    }
    if (fd >= 0)
        close(fd);
    if (error) {
        fuse_reply_err(req, error);
        return;
    }
    struct inode *inode = take_inode(path_fd, &st);
    pthread_mutex_lock(&dir->lock);
    double left = remaining(dir);
    keep_name(dir, name, inode, now() + left);
    pthread_mutex_unlock(&dir->lock);
    pthread_mutex_lock(&inode->lock);
    bool changed = keep_attr(inode, &st);
    error = add_opener(inode, fi->flags);
    struct fuse_entry_param entry = {
        .ino = number_of(inode), .generation = inode->generation, .attr = seen_attr(inode),
        .attr_timeout = remaining(inode), .entry_timeout = left,
    };
    pthread_mutex_unlock(&inode->lock);
    if (error) {
        fuse_reply_err(req, error);
        put_inode(inode, 1, 0);
        return;
    }
    give_handle(inode, fi);
    inode->opener = fuse_req_ctx(req)->pid;
    fi->keep_cache = !changed;
    if (fuse_reply_create(req, &entry, fi)) {
        remove_opener(inode);
        free(file_of(fi));
        put_inode(inode, 1, 0);
    }
}

/* Tell whether a file was opened before the server restarted. */
static bool is_stale(const struct file *file)
{
    refresh_faults();
    return file->epoch != server_epoch();
}

static void do_read(fuse_req_t req, fuse_ino_t number, size_t size, off_t offset,
                    struct fuse_file_info *fi)
{
    struct inode *inode = inode_of(number);
    current = req;
    int error = ask(READ, inode, NULL);
    if (error <= 0 && is_stale(file_of(fi)))
        error = ESTALE;
    if (error > 0) {
        fuse_reply_err(req, error);
        return;
    }
    pthread_mutex_lock(&inode->lock);
    int fd = inode->read_fd >= 0 ? inode->read_fd : inode->write_fd;
    if (!inode->dirty) {
        pthread_mutex_unlock(&inode->lock); /* the descriptor lives as long as this opener */
        struct fuse_bufvec data = FUSE_BUFVEC_INIT(size);
        data.buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK | FUSE_BUF_FD_RETRY;
        data.buf[0].fd = fd;
        data.buf[0].pos = offset;
        count(READ_BYTES, size);
        fuse_reply_data(req, &data, 0);
        return;
    }
    char *buffer = make(size);
    ssize_t got = pread(fd, buffer, size, offset);
    error = got < 0 ? errno : 0;
    off_t end = offset + (got < 0 ? 0 : got);
    for (struct chunk *chunk = inode->dirty; chunk; chunk = chunk->next) {
        off_t first = chunk->offset > offset ? chunk->offset : offset;
        off_t last = chunk->offset + (off_t)chunk->size;
        if (last > offset + (off_t)size)
            last = offset + (off_t)size;
        if (first >= last)
            continue;
        memcpy(buffer + (first - offset), chunk->data + (first - chunk->offset), last - first);
        if (last > end)
            end = last;
    }
    pthread_mutex_unlock(&inode->lock);
    if (error)
        fuse_reply_err(req, error);
    else
        fuse_reply_buf(req, buffer, end - offset);
    count(READ_BYTES, end - offset);
    free(buffer);
}

static void do_write(fuse_req_t req, fuse_ino_t number, const char *data, size_t size, off_t offset,
                     struct fuse_file_info *fi)
{
    struct inode *inode = inode_of(number);
    current = req;
    if (is_stale(file_of(fi))) {
        fuse_reply_err(req, ESTALE);
        return;
    }
    pthread_mutex_lock(&inode->lock);
    keep_written(inode, data, size, offset);
    bool full = inode->dirty_bytes > MAX_DIRTY;
    pthread_mutex_unlock(&inode->lock);
    if (full)
        send_written(inode);
    fuse_reply_write(req, size);
}

/* Send what has been written; return what close(2) or fsync(2) is told. */
static int write_back(struct inode *inode, const struct file *file)
{
    if (is_stale(file)) {
        pthread_mutex_lock(&inode->lock);
        bool lost = inode->dirty;
        pthread_mutex_unlock(&inode->lock);
        drop_written(inode);
        return lost ? ESTALE : take_error(inode);
    }
    send_written(inode);
    return take_error(inode);
}

static void do_flush(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *fi)
{
    current = req;
    inode_of(number)->opener = 0;
    fuse_reply_err(req, write_back(inode_of(number), file_of(fi)));
}

static void do_fsync(fuse_req_t req, fuse_ino_t number, int datasync, struct fuse_file_info *fi)
{
    struct inode *inode = inode_of(number);
    (void)datasync;
    current = req;
    if (is_stale(file_of(fi))) {
        drop_written(inode);
        fuse_reply_err(req, ESTALE);
        return;
    }
    int error = write_back(inode, file_of(fi)); /* which commits, too */
    if (!error && fdatasync(inode->write_fd >= 0 ? inode->write_fd : inode->read_fd))
        error = errno;
    fuse_reply_err(req, error);
}

static void do_release(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *fi)
{
    struct inode *inode = inode_of(number);
    current = NULL; /* nobody waits for it */
    if (!is_stale(file_of(fi)))
        send_written(inode);
    remove_opener(inode);
    free(file_of(fi));
    fuse_reply_err(req, 0); /* the kernel may forget the inode from here on */
}

static void do_fallocate(fuse_req_t req, fuse_ino_t number, int mode, off_t offset, off_t size,
                         struct fuse_file_info *fi)
{
    struct inode *inode = inode_of(number);
    struct stat st;
    current = req;
    int error = write_back(inode, file_of(fi));
    if (!error)
        error = ask(WRITE, inode, NULL);
    if (error <= 0)
        error = fallocate(inode->write_fd, mode, offset, size) ? errno : 0;
    pthread_mutex_lock(&inode->lock);
    if (!fstatat(inode->path_fd, "", &st, AT_EMPTY_PATH))
        keep_attr(inode, &st);
    pthread_mutex_unlock(&inode->lock);
    fuse_reply_err(req, error);
}

/* ---- open directories ---- */

static void release_listing(struct listing *listing)
{
    if (!listing || --listing->holders)
        return;
    for (size_t i = 0; i < listing->count; i++)
        free(listing->entries[i].name);
    free(listing->entries);
    free(listing);
}

/* Read a directory at the server. */
static struct listing *read_listing(struct inode *dir, int *error)
{
    *error = ask(READDIR, dir, NULL);
    int fd = *error > 0 ? -1 : openat(dir->path_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    if (!stream) {
        if (*error <= 0)
            *error = errno;
        return NULL;
    }
    struct listing *listing = make(sizeof *listing);
    listing->holders = 1;
    for (struct dirent *entry; (entry = readdir(stream));) {
        if (listing->count == listing->room) {
            listing->room = listing->room ? 2 * listing->room : 64;
            listing->entries = realloc(listing->entries, listing->room * sizeof *listing->entries);
            if (!listing->entries)
                abort();
        }
        listing->entries[listing->count++] = (struct entry){
            .ino = entry->d_ino, .type = entry->d_type, .name = strdup(entry->d_name),
        };
    }
    closedir(stream);
    count(READDIR, listing->count / 256);
    *error = 0;
    return listing;
}

static void do_opendir(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *fi)
{
    struct inode *dir = inode_of(number);
    bool changed = false;
    current = req;
    int error = settings.cto ? fetch_attr(dir, OPENDIR, 0, &changed) : freshen(dir);
    if (error) {
        fuse_reply_err(req, error);
        return;
    }
    struct folder *folder = make(sizeof *folder);
    folder->inode = dir;
    fi->fh = (uintptr_t)folder;
    dir->opener = fuse_req_ctx(req)->pid;
    if (fuse_reply_open(req, fi))
        free(folder);
}

/* Give an open directory the cached listing, or read one. */
static int find_listing(struct folder *folder)
{
    struct inode *dir = folder->inode;
    int error = 0;
    pthread_mutex_lock(&dir->lock);
    folder->listing = dir->listing;
    if (folder->listing)
        folder->listing->holders++;
    uint64_t version = dir->names_version;
    struct stat before = dir->attr;
    pthread_mutex_unlock(&dir->lock);
    if (folder->listing)
        return 0;
    folder->listing = read_listing(dir, &error);
    if (error)
        return error;
    pthread_mutex_lock(&dir->lock);
    if (!dir->listing && version == dir->names_version && unchanged(&before, &dir->attr)) {
        dir->listing = folder->listing;
        dir->listing->holders++;
    }
    pthread_mutex_unlock(&dir->lock);
    return 0;
}

static void do_readdir(fuse_req_t req, fuse_ino_t number, size_t size, off_t offset,
                       struct fuse_file_info *fi)
{
    struct folder *folder = (struct folder *)(uintptr_t)fi->fh;
    (void)number;
    current = req;
    int error = folder->listing ? 0 : find_listing(folder);
    if (error) {
        fuse_reply_err(req, error);
        return;
    }
    char *buffer = make(size);
    size_t used = 0;
    for (size_t i = offset; i < folder->listing->count; i++) {
        const struct entry *entry = &folder->listing->entries[i];
        struct stat st = {.st_ino = entry->ino, .st_mode = (mode_t)entry->type << 12};
        size_t needed =
            fuse_add_direntry(req, buffer + used, size - used, entry->name, &st, (off_t)i + 1);
        if (needed > size - used)
            break;
        used += needed;
    }
    if (!used)
        folder->inode->opener = 0;
    fuse_reply_buf(req, buffer, used);
    free(buffer);
}

static void do_releasedir(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *fi)
{
    struct folder *folder = (struct folder *)(uintptr_t)fi->fh;
    (void)number;
    if (!folder->listing)
        folder->inode->opener = 0; /* it was opened, and not read */
    release_listing(folder->listing);
    free(folder);
    fuse_reply_err(req, 0);
}

static void do_fsyncdir(fuse_req_t req, fuse_ino_t number, int datasync, struct fuse_file_info *fi)
{
    (void)number, (void)datasync, (void)fi; /* a server does not answer before a change lasts */
    fuse_reply_err(req, 0);
}

static void do_statfs(fuse_req_t req, fuse_ino_t number)
{
    struct statvfs st;
    current = req;
    int error = ask(STATFS, inode_of(number), NULL);
    if (error <= 0)
        error = fstatvfs(root.path_fd, &st) ? errno : 0;
    if (error)
        fuse_reply_err(req, error);
    else
        fuse_reply_statfs(req, &st);
}

static void do_init(void *unused, struct fuse_conn_info *conn)
{
    (void)unused;
    conn->max_write = WIRE_SIZE;
    conn->max_background = 64;
    conn->want |= conn->capable
        & (FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE | FUSE_CAP_AUTO_INVAL_DATA
           | FUSE_CAP_PARALLEL_DIROPS | FUSE_CAP_ASYNC_READ | FUSE_CAP_EXPIRE_ONLY);
    conn->want &= ~FUSE_CAP_ATOMIC_O_TRUNC;
    can_expire = conn->capable & FUSE_CAP_EXPIRE_ONLY;
}

static const struct fuse_lowlevel_ops OPERATIONS = {
    .init = do_init, .lookup = do_lookup, .forget = do_forget, .forget_multi = do_forget_multi,
    .getattr = do_getattr, .setattr = do_setattr, .readlink = do_readlink, .mknod = do_mknod,
    .mkdir = do_mkdir, .unlink = do_unlink, .rmdir = do_rmdir, .symlink = do_symlink,
    .rename = do_rename, .link = do_link, .open = do_open, .read = do_read, .write = do_write,
    .flush = do_flush, .release = do_release, .fsync = do_fsync, .opendir = do_opendir,
    .readdir = do_readdir, .releasedir = do_releasedir, .fsyncdir = do_fsyncdir,
    .statfs = do_statfs, .create = do_create, .fallocate = do_fallocate,
};

/* ---- start ---- */

static int parse_options(char *text)
{
    const struct { const char *name; double *value; } numbers[] = {
        {"acregmin", &settings.acregmin}, {"acregmax", &settings.acregmax},
        {"acdirmin", &settings.acdirmin}, {"acdirmax", &settings.acdirmax},
        {"dirty", &settings.dirty},
    };
    char *rest = NULL;
    for (char *word = strtok_r(text, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        char *value = strchr(word, '=');
        bool known = !strcmp(word, "cto") || !strcmp(word, "nocto");
        if (known)
            settings.cto = *word == 'c';
        if (value)
            *value++ = 0;
        for (size_t i = 0; value && i < sizeof numbers / sizeof *numbers; i++)
            if (!strcmp(word, numbers[i].name)) {
                *numbers[i].value = strtod(value, NULL);
                known = true;
            }
        if (!known) {
            fprintf(stderr, "nfs_client: unknown option %s\n", word);
            return -1;
        }
    }
    return 0;
}

static int map_counts(void)
{
    char name[PATH_MAX];
    size_t size = NUM_COUNTS * sizeof *counts;
    snprintf(name, sizeof name, "%s.counts", settings.client);
    int fd = openat(control_fd, name, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0 || ftruncate(fd, size))
        return -1;
    counts = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (counts == MAP_FAILED)
        return -1;
    for (int i = 0; i < NUM_COUNTS; i++)
        strncpy(counts[i].name, OP_NAMES[i], sizeof counts[i].name);
    return 0;
}

static int prepare(char *const *argv)
{
    struct stat st;
    struct rlimit limit;
    umask(0);
    if (!getrlimit(RLIMIT_NOFILE, &limit)) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
    }
    mallopt(M_MMAP_THRESHOLD, 64 << 20);
    mallopt(M_TRIM_THRESHOLD, 256 << 20);
    settings.client = argv[1];
    if (parse_options(argv[5]))
        return -1;
    int fd = open(argv[2], O_PATH | O_DIRECTORY | O_CLOEXEC);
    control_fd = open(argv[4], O_PATH | O_DIRECTORY | O_CLOEXEC);
    server_lock_fd = openat(control_fd, "lock", O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || control_fd < 0 || server_lock_fd < 0 || fstat(fd, &st) || map_counts()) {
        perror("nfs_client");
        return -1;
    }
    init_inode(&root, fd, &st);
    return 0; /* the attributes of the root are fetched when somebody asks */
}

int main(int argc, char **argv)
{
    pthread_t thread;
    if (argc != 6) {
        fprintf(stderr, "usage: nfs_client CLIENT FOLDER MOUNT_POINT CONTROL OPTIONS\n");
        return 2;
    }
    if (prepare(argv))
        return 1;
    char option[PATH_MAX]; /* the options stand in the place of the source, for all to read */
    snprintf(option, sizeof option,
             "allow_other,default_permissions,subtype=hpc_elastic_nfs,fsname=%s\\,acregmin=%g"
             "\\,acregmax=%g\\,acdirmin=%g\\,acdirmax=%g",
             settings.cto ? "cto" : "nocto", settings.acregmin, settings.acregmax,
             settings.acdirmin, settings.acdirmax);
    char *fuse_argv[] = {argv[0], "-o", option, NULL};
    struct fuse_args args = FUSE_ARGS_INIT(3, fuse_argv);
    session = fuse_session_new(&args, &OPERATIONS, sizeof OPERATIONS, NULL);
    if (!session || fuse_session_mount(session, argv[3]))
        return 1;
    if (pthread_create(&thread, NULL, expire_for_ever, NULL)
        || pthread_create(&thread, NULL, send_for_ever, NULL))
        return 1;
    struct fuse_loop_config *loop = fuse_loop_cfg_create();
    fuse_loop_cfg_set_clone_fd(loop, 0);
    fuse_loop_cfg_set_max_threads(loop, 1000); /* a stopped server must not use up all of them */
    fuse_loop_cfg_set_idle_threads(loop, 16);
    int error = fuse_session_loop_mt(session, loop);
    fuse_session_unmount(session);
    return error ? 1 : 0;
}
