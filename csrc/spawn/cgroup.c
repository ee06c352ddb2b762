/* spawn/cgroup.c: a cgroup v2 leaf for each worker, if this process owns its cgroup (delegation).
 *
 * What a worker starts stays in its leaf, in whatever session and environment, and cgroup.kill
 * (Linux 5.14) ends all of it at once, however fast it forks. Workers start in their leaf
 * (clone3, CLONE_INTO_CGROUP, Linux 5.7): a move afterwards takes the kernel some 15 ms.
 * Delegation: the kernel's cgroup-v2.rst, and systemd.resource-control(5) for the attribute that
 * root looks at. Where anything of it is missing the launch does without; the other ways to find
 * leftovers stay. */
#include "group/group.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#define OWN_FOLDER_SIZE 1024u
#define EMPTY_WAIT_MS 1000 /* for the kernel to take what has died out of its cgroup */

static bool has_attribute(const char *folder, const char *name) {
    char value[4];
    return getxattr(folder, name, value, sizeof value) >= 1 && value[0] == '1';
}

/* Root may write anywhere. For root the attribute decides, or the top of a cgroup namespace (a
 * container's), which has the files that the real root has not. */
static bool is_delegated(const char *folder, bool is_top) {
    struct stat status;
    char path[OWN_FOLDER_SIZE + 16];
    (void)snprintf(path, sizeof path, "%s/cgroup.kill", folder);
    if (stat(folder, &status) < 0 || access(path, W_OK) < 0) return false;
    if (geteuid() != 0) return status.st_uid == geteuid();
    return is_top || has_attribute(folder, "trusted.delegate") ||
           has_attribute(folder, "user.delegate");
}

/* The line of v2 comes after those of v1's controllers (cgroups(7)), which can be long. */
static void own_line(const char *line, void *with) {
    char *path = with;
    if (strncmp(line, "0::/", 4) == 0) (void)snprintf(path, LINE_SIZE, "%s", line + 3);
}

/* The folder of this process's cgroup, at one of the two usual mount points of v2. */
static bool own_folder(char ret_folder[OWN_FOLDER_SIZE]) {
    char path[LINE_SIZE] = "";
    if (process_lines("/proc/self/cgroup", own_line, path) < 0) return false;
    if (path[0] == '\0' || strlen(path) + 4 >= LINE_SIZE) return false; /* none, or cut short */
    const char *const mounts[] = {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"};
    for (size_t i = 0; i < 2; i++) {
        struct statfs mount;
        if (statfs(mounts[i], &mount) < 0 || mount.f_type != CGROUP2_SUPER_MAGIC) continue;
        int n = snprintf(ret_folder, OWN_FOLDER_SIZE, "%s%s", mounts[i], path);
        return n < (int)OWN_FOLDER_SIZE && is_delegated(ret_folder, path[1] == '\0');
    }
    return false;
}

static void leaf_name(char ret_name[32], uint32_t index) {
    (void)snprintf(ret_name, 32, "rank-%u", (unsigned)index);
}

/* The launch's folder has the name of its id, which follows the mark's =. */
int cgroup_open(struct ir_group *g, uint32_t n) {
    char own[OWN_FOLDER_SIZE], name[32];
    const char *id = strchr(g->mark, '=');
    if ((g->config.flags & (IR_NO_CGROUP | IR_NO_PIDFD)) || !CAN_BE_BORN_INTO_CGROUP) return 0;
    if (id == NULL || strchr(id, '/') != NULL || !own_folder(own)) return 0;
    struct cgroup *cgroup = &g->cgroup;
    if (asprintf(&cgroup->path, "%s/infini-run-%s", own, id + 1) < 0) {
        cgroup->path = NULL;
        return -ENOMEM;
    }
    if (mkdir(cgroup->path, 0755) < 0) return 0;
    cgroup->fd = fd_new(open(cgroup->path, O_PATH | O_DIRECTORY | O_CLOEXEC));
    for (; cgroup->fd >= 0 && cgroup->leaves < n; cgroup->leaves++) {
        leaf_name(name, cgroup->leaves);
        if (mkdirat(cgroup->fd, name, 0755) == 0) continue;
        cgroup_close(g); /* cgroup.max.descendants, say */
        return 0;
    }
    return cgroup->fd < 0 ? cgroup->fd : 0;
}

/* The leaf for the birth of a child; -1: none. */
int cgroup_leaf(const struct ir_group *g, uint32_t index) {
    char name[32];
    if (g->cgroup.fd < 0 || index >= g->cgroup.leaves) return -1;
    leaf_name(name, index);
    return openat(g->cgroup.fd, name, O_PATH | O_DIRECTORY | O_CLOEXEC);
}

/* SIGKILL to all in it, and to what they are just forking. */
static void folder_kill(int folder, const char *file) {
    int fd = openat(folder, file, O_WRONLY | O_CLOEXEC);
    ssize_t written = write(fd, "1", 1);
    (void)written; /* what it does not reach, the other ways do */
    (void)fd_close(fd);
}

void cgroup_kill(const struct ir_group *g) {
    if (g->cgroup.fd >= 0) folder_kill(g->cgroup.fd, "cgroup.kill");
}

void cgroup_kill_leaf(const struct ir_group *g, uint32_t index) {
    char leaf[32], file[48];
    if (g->cgroup.fd < 0 || index >= g->cgroup.leaves) return;
    leaf_name(leaf, index);
    (void)snprintf(file, sizeof file, "%s/cgroup.kill", leaf);
    folder_kill(g->cgroup.fd, file);
}

static void procs_mark(int folder, struct processes *all) {
    int fd = openat(folder, "cgroup.procs", O_RDONLY | O_CLOEXEC);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
    if (file == NULL) {
        (void)fd_close(fd);
        return;
    }
    for (int pid; fscanf(file, "%d", &pid) == 1;) {
        struct process *p = process_find(all, pid);
        if (p != NULL && !process_has_ended(p)) p->ours = true;
    }
    (void)fclose(file);
}

/* With those that workers have made in theirs. */
static void tree_mark(int at, const char *name, struct processes *all) {
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (dir == NULL) {
        (void)fd_close(fd);
        return;
    }
    procs_mark(fd, all);
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
        if (entry->d_type == DT_DIR && entry->d_name[0] != '.') tree_mark(fd, entry->d_name, all);
    (void)closedir(dir);
}

void cgroup_mark(const struct ir_group *g, struct processes *all) {
    if (g->cgroup.fd >= 0) tree_mark(g->cgroup.fd, ".", all);
}

void cgroup_mark_leaf(const struct ir_group *g, uint32_t index, struct processes *all) {
    char name[32];
    if (g->cgroup.fd < 0 || index >= g->cgroup.leaves) return;
    leaf_name(name, index);
    tree_mark(g->cgroup.fd, name, all);
}

/* The kernel keeps a cgroup while the dead are in it; cgroup.events shows when it is empty. */
static void folder_wait(int folder) {
    char events[64];
    struct pollfd changed = {.fd = openat(folder, "cgroup.events", O_RDONLY | O_CLOEXEC),
                             .events = POLLPRI};
    if (read(changed.fd, events, sizeof events) > 0 && strncmp(events, "populated 1", 11) == 0)
        (void)poll(&changed, 1, EMPTY_WAIT_MS);
    (void)fd_close(changed.fd);
}

static void tree_remove(int at, const char *name) {
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (dir == NULL) {
        (void)fd_close(fd);
        return;
    }
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;)
        if (entry->d_type == DT_DIR && entry->d_name[0] != '.') tree_remove(fd, entry->d_name);
    (void)closedir(dir);
    (void)unlinkat(at, name, AT_REMOVEDIR);
}

void cgroup_close(struct ir_group *g) {
    struct cgroup *cgroup = &g->cgroup;
    char name[32];
    bool removed = cgroup->fd >= 0;
    for (; removed && cgroup->leaves > 0; cgroup->leaves--) {
        leaf_name(name, cgroup->leaves - 1);
        removed = unlinkat(cgroup->fd, name, AT_REMOVEDIR) == 0;
    }
    if (removed) removed = rmdir(cgroup->path) == 0;
    if (cgroup->fd >= 0 && !removed) { /* the dead are still in it, or what workers have made */
        folder_wait(cgroup->fd);
        tree_remove(AT_FDCWD, cgroup->path);
    }
    cgroup->fd = fd_close(cgroup->fd);
    cgroup->leaves = 0;
    free(cgroup->path);
    cgroup->path = NULL;
}
