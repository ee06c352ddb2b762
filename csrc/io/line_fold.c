/* io/line_fold.c: lines that several ranks write alike, once. Pure: bytes and time in, bytes out.
 *
 * A list of lines, each with the ranks that wrote it. A rank's line joins the first equal one behind the last that
 * the rank shares, or becomes the newest. Lines that the rank alone has written in between then move before the one
 * that it joins: so each rank's lines keep their order, and a line of its own does not end what it has in common.
 * Lines leave at the front, when all ranks have written them or their time is up. A full list
 * returns -ENOSPC. */
#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "include/irun.h"

#define NS_PER_MS 1000000LL
#define LINES_MOST 1024u
#define LINES_LEAST 2u
#define WORDS_MOST (128u * 1024) /* of all lines' ranks; 1 MiB */
#define BYTES_MOST (256u * 1024) /* of all lines */
#define BUCKETS 16384u /* of each of two filters: a search of the list needs the hash in both */
#define RANGES_MOST 8u /* written out; ranks beyond count only */

struct held {
    uint32_t before, after; /* its neighbors in the list */
    uint32_t size, count;   /* bytes, ranks */
    uint32_t writer;        /* the rank that wrote it first */
    int32_t stream;
    uint64_t serial;       /* never used again; 0: it is not in the list */
    uint64_t writers_line; /* which of the writer's lines it is */
    uint64_t hash;
    int64_t time_ns, due_ns;
    char *bytes;
};

struct rank {
    uint64_t lines;       /* that it has written */
    uint64_t shared_line; /* which of them is the last that it has in common with others; 0: none */
    uint64_t shared_serial; /* its held line, if there still is one */
    uint32_t shared_at;
    uint32_t own; /* how many held lines it alone has written */
};

struct ir_fold {
    uint32_t n, words, capacity; /* ranks; 64-bit words of their set; lines */
    uint32_t expected[2];
    uint32_t count, bytes; /* that are held */
    uint32_t free;         /* the first free line of a chain by `after` */
    uint64_t serial;
    struct rank *ranks;
    uint64_t *sets;               /* of ranks, for each line */
    struct held *lines;           /* and the list's two ends: lines[capacity] */
    uint16_t (*by_hash)[BUCKETS]; /* how many held lines, by the low and by the high half */
};

struct ir_fold *ir_fold_free(struct ir_fold *fold) {
    if (fold == NULL) return NULL;
    for (uint32_t i = 0; fold->lines != NULL && i < fold->capacity; i++)
        if (fold->lines[i].serial != 0) free(fold->lines[i].bytes);
    free(fold->ranks);
    free(fold->sets);
    free(fold->lines);
    free(fold->by_hash);
    free(fold);
    return NULL;
}

int ir_fold_new(uint32_t n, const uint32_t *expected, struct ir_fold **ret_fold) {
    *ret_fold = NULL;
    if (n == 0 || n > INT32_MAX) return -EINVAL;
    struct ir_fold *fold = calloc(1, sizeof *fold);
    if (fold == NULL) return -ENOMEM;
    fold->n = n;
    fold->words = (n + 63) / 64;
    fold->capacity = WORDS_MOST / fold->words;
    if (fold->capacity > LINES_MOST) fold->capacity = LINES_MOST;
    if (fold->capacity < LINES_LEAST) fold->capacity = LINES_LEAST;
    for (int k = 0; k < 2; k++) fold->expected[k] = expected[k];
    fold->ranks = calloc(n, sizeof *fold->ranks);
    fold->sets = calloc((size_t)fold->capacity * fold->words, sizeof *fold->sets);
    fold->lines = calloc(fold->capacity + 1, sizeof *fold->lines);
    fold->by_hash = calloc(2, sizeof *fold->by_hash);
    if (!fold->ranks || !fold->sets || !fold->lines || !fold->by_hash) {
        (void)ir_fold_free(fold);
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < fold->capacity; i++) fold->lines[i].after = i + 1;
    fold->lines[fold->capacity].before = fold->lines[fold->capacity].after = fold->capacity;
    *ret_fold = fold;
    return 0;
}

/* ---- the list; its place `capacity` is before the first and after the last line */

static uint32_t first_of(const struct ir_fold *fold) {
    return fold->lines[fold->capacity].after;
}

static void line_link(struct ir_fold *fold, uint32_t at, uint32_t after) {
    struct held *lines = fold->lines;
    uint32_t before = lines[after].before;
    lines[at].before = before;
    lines[at].after = after;
    lines[before].after = lines[after].before = at;
}

static void line_unlink(struct ir_fold *fold, uint32_t at) {
    struct held *lines = fold->lines;
    lines[lines[at].before].after = lines[at].after;
    lines[lines[at].after].before = lines[at].before;
}

static uint64_t *set_of(const struct ir_fold *fold, uint32_t at) {
    return &fold->sets[(size_t)at * fold->words];
}

static uint16_t *bucket_of(const struct ir_fold *fold, uint64_t hash, int half) {
    return &fold->by_hash[half][(half == 0 ? hash : hash >> 32) % BUCKETS];
}

static void hash_count(struct ir_fold *fold, uint64_t hash, int by) {
    for (int half = 0; half < 2; half++) {
        uint16_t *count = bucket_of(fold, hash, half);
        *count = (uint16_t)(*count + by);
    }
}

static bool hash_is_held(const struct ir_fold *fold, uint64_t hash) {
    return *bucket_of(fold, hash, 0) > 0 && *bucket_of(fold, hash, 1) > 0;
}

static uint64_t hash_of(const char *bytes, uint32_t size) {
    uint64_t hash = size;
    for (uint32_t i = 0; i < size; i += 8) {
        uint64_t word = 0;
        memcpy(&word, bytes + i, size - i < 8 ? size - i : 8);
        hash = (hash ^ word) * UINT64_C(0x9e3779b97f4a7c15);
        hash ^= hash >> 29;
    }
    return hash;
}

/* ---- a line comes */

static void line_share(struct ir_fold *fold, uint32_t at, uint32_t rank, uint64_t line) {
    struct rank *r = &fold->ranks[rank];
    if (line <= r->shared_line) return;
    r->shared_line = line;
    r->shared_at = at;
    r->shared_serial = fold->lines[at].serial;
}

/* An equal line that the rank may join; `capacity`: none. */
static uint32_t line_find(const struct ir_fold *fold, uint32_t rank, const struct held *new,
                          const char *bytes) {
    if (!hash_is_held(fold, new->hash)) return fold->capacity;
    const struct rank *r = &fold->ranks[rank];
    bool shares = r->shared_line > 0 && fold->lines[r->shared_at].serial == r->shared_serial;
    uint32_t at = shares ? fold->lines[r->shared_at].after : first_of(fold);
    for (; at < fold->capacity; at = fold->lines[at].after) {
        const struct held *held = &fold->lines[at];
        if (held->hash != new->hash || held->size != new->size || held->stream != new->stream)
            continue;
        if (set_of(fold, at)[rank / 64] >> rank % 64 & 1) continue;
        if (memcmp(held->bytes, bytes, new->size) == 0) break;
    }
    return at;
}

/* What the rank alone has written behind that line goes before it, and leaves no later. */
static void own_lines_move(struct ir_fold *fold, uint32_t to, uint32_t rank) {
    struct held *lines = fold->lines;
    if (fold->ranks[rank].own == 0) return;
    for (uint32_t at = lines[to].after, next; at < fold->capacity; at = next) {
        next = lines[at].after;
        if (lines[at].count > 1 || lines[at].writer != rank) continue;
        line_unlink(fold, at);
        line_link(fold, at, to);
        if (lines[at].due_ns > lines[to].due_ns) lines[at].due_ns = lines[to].due_ns;
    }
}

static void line_join(struct ir_fold *fold, uint32_t at, uint32_t rank) {
    struct held *held = &fold->lines[at];
    own_lines_move(fold, at, rank);
    set_of(fold, at)[rank / 64] |= UINT64_C(1) << rank % 64;
    if (held->count++ == 1) fold->ranks[held->writer].own--;
    line_share(fold, at, held->writer, held->writers_line);
    line_share(fold, at, rank, ++fold->ranks[rank].lines);
}

static int line_add(struct ir_fold *fold, uint32_t rank, struct held *new, const char *bytes) {
    if (fold->count == fold->capacity || fold->bytes + new->size > BYTES_MOST) return -ENOSPC;
    new->bytes = malloc(new->size);
    if (new->bytes == NULL) return -ENOMEM;
    memcpy(new->bytes, bytes, new->size);
    uint32_t at = fold->free;
    fold->free = fold->lines[at].after;
    new->serial = ++fold->serial;
    new->writers_line = ++fold->ranks[rank].lines;
    fold->lines[at] = *new;
    line_link(fold, at, fold->capacity);
    memset(set_of(fold, at), 0, fold->words * sizeof *fold->sets);
    set_of(fold, at)[rank / 64] = UINT64_C(1) << rank % 64;
    fold->count++;
    fold->ranks[rank].own++;
    fold->bytes += new->size;
    hash_count(fold, new->hash, 1);
    return 0;
}

int ir_fold_add(struct ir_fold *fold, uint32_t rank, int stream, const char *line, uint32_t size,
                int64_t now_ns) {
    if (rank >= fold->n || stream < 0 || stream > 1 || size == 0) return -EINVAL;
    if (size > IR_FOLD_LINE) return -EMSGSIZE;
    struct held new = {.hash = hash_of(line, size), .size = size, .stream = stream};
    new.writer = rank, new.count = 1;
    new.time_ns = now_ns, new.due_ns = now_ns + IR_FOLD_MS *NS_PER_MS;
    uint32_t at = line_find(fold, rank, &new, line);
    if (at == fold->capacity) return line_add(fold, rank, &new, line);
    line_join(fold, at, rank);
    return 0;
}

/* ---- a line leaves */

int64_t ir_fold_due_ns(const struct ir_fold *fold) {
    const struct held *held = &fold->lines[first_of(fold)];
    if (fold->count == 0) return INT64_MAX;
    return held->count >= fold->expected[held->stream] ? held->time_ns : held->due_ns;
}

static uint32_t rank_from(const struct ir_fold *fold, uint32_t rank, bool wanted) {
    const uint64_t *set = set_of(fold, first_of(fold));
    while (rank < fold->n && (set[rank / 64] >> rank % 64 & 1) != wanted) rank++;
    return rank;
}

int ir_fold_first(const struct ir_fold *fold, struct ir_folded *ret_line) {
    if (fold->count == 0) return 0;
    const struct held *held = &fold->lines[first_of(fold)];
    ret_line->line = held->bytes;
    ret_line->size = held->size;
    ret_line->stream = held->stream;
    ret_line->count = held->count;
    ret_line->rank = held->count == 1 ? held->writer : rank_from(fold, 0, true);
    ret_line->time_ns = held->time_ns;
    return 1;
}

uint32_t ir_fold_ranks(const struct ir_fold *fold, uint32_t offset, char *ret_text) {
    char *at = ret_text, *end = ret_text + IR_FOLD_RANKS;
    uint32_t left = fold->count > 0 ? fold->lines[first_of(fold)].count : 0, rank = 0;
    for (uint32_t i = 0; left > 0 && i < RANGES_MOST; i++) {
        uint32_t from = rank_from(fold, rank, true);
        rank = rank_from(fold, from, false);
        left -= rank - from;
        at += snprintf(at, (size_t)(end - at), i == 0 ? "%u" : ",%u", from + offset);
        if (rank - from > 1) at += snprintf(at, (size_t)(end - at), "-%u", rank - 1 + offset);
    }
    if (left > 0) at += snprintf(at, (size_t)(end - at), " and %u more", left);
    return (uint32_t)(at - ret_text);
}

void ir_fold_drop(struct ir_fold *fold) {
    if (fold->count == 0) return;
    uint32_t at = first_of(fold);
    struct held *held = &fold->lines[at];
    line_unlink(fold, at);
    free(held->bytes);
    fold->bytes -= held->size;
    fold->count--;
    if (held->count == 1) fold->ranks[held->writer].own--;
    hash_count(fold, held->hash, -1);
    held->serial = 0;
    held->after = fold->free;
    fold->free = at;
}
