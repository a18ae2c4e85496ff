/* A decode step of a small Llama-like model, one token a row, in float32.
 *
 * Rows never look at each other's new token, so that a thread takes its rows through all layers without waiting for
 * another one: while one multiplies, the other may be fetching keys and values. In a step made of torch's operations
 * every one of some hundred ends with all threads waiting for the last. No result depends on the number of threads.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 32 /* floats of a head that are summed in registers; a head must be a multiple of it */
#define AHEAD 8  /* dimensions of keys asked for before they are needed: rows are too short for the hardware to guess */
#ifdef __AVX512F__
#define LANES 16 /* floats of a vector */
#define TALL 8   /* rows that are multiplied at once: with two vectors a row, all sums stay in registers */
#else
#define LANES 8
#define TALL 4
#endif
#define PANEL (2 * LANES) /* columns of a matrix that lie side by side in memory, [panel, depth, column] */
#define FEW 4             /* what a thread's rows are a multiple of, but for the last one's */
#define TOGETHER 32       /* rows that go through a layer together: what is computed of them stays in the cache */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));

const int64_t lanes = LANES; /* for who packs the matrices */

static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = __builtin_rintf(x * 1.44269504f);
    float r = __builtin_fmaf(n, 2.12194440e-4f, __builtin_fmaf(n, -0.693359375f, x));
    float p = 1.9875691500e-4f;
    p = __builtin_fmaf(p, r, 1.3981999507e-3f);
    p = __builtin_fmaf(p, r, 8.3334519073e-3f);
    p = __builtin_fmaf(p, r, 4.1665795894e-2f);
    p = __builtin_fmaf(p, r, 1.6666665459e-1f);
    p = __builtin_fmaf(p, r, 5.0000001201e-1f);
    p = __builtin_fmaf(p * r, r, r + 1.0f);
    union { int32_t bits; float value; } power = {.bits = ((int32_t)n + 127) << 23};
    return p * power.value;
}

static void fetch(const float *from, int64_t floats) {
    for (int64_t i = 0; i < floats; i += 16) __builtin_prefetch(from + i, 0, 2);
}

static float root_mean_square(const float *x, int64_t dim, float eps) {
    float sum = 0;
    for (int64_t d = 0; d < dim; d++) sum += x[d] * x[d];
    return 1.0f / sqrtf(sum / (float)dim + eps);
}

/* A query or key: head norm (where there is one), rotary position, scale. */
static void place(float *restrict to, const float *restrict x, const float *norm, float eps, const float *cosines,
                  const float *signed_sines, int64_t dim, float scale) {
    int64_t half = dim / 2;
    float y[dim];
    float f = norm ? root_mean_square(x, dim, eps) : 1.0f;
    for (int64_t d = 0; d < dim; d++) y[d] = norm ? x[d] * f * norm[d] : x[d];
    for (int64_t d = 0; d < half; d++) {
        to[d] = (y[d] * cosines[d] + y[d + half] * signed_sines[d]) * scale;
        to[d + half] = (y[d + half] * cosines[d + half] + y[d] * signed_sines[d + half]) * scale;
    }
}

/* Scores of two queries over keys [dim, position]; `later` is what will be read next. */
static void score(float *restrict a, float *restrict b, const float *restrict q, const float *restrict p,
                  const float *restrict keys, int64_t stride, int64_t dim, int64_t length, const float *later,
                  int64_t later_floats) {
    int64_t share = later_floats * 4 / dim;
    for (int64_t i = 0; i < length; i++) a[i] = b[i] = 0;
    for (int64_t d = 0; d < dim; d += 4) {
        const float *k0 = keys + d * stride, *k1 = k0 + stride, *k2 = k1 + stride, *k3 = k2 + stride;
        if (later_floats && d + AHEAD < dim)
            for (int64_t j = AHEAD; j < AHEAD + 4; j++) fetch(k0 + j * stride, length);
        fetch(later + d / 4 * share, share);
        float q0 = q[d], q1 = q[d + 1], q2 = q[d + 2], q3 = q[d + 3];
        float p0 = p[d], p1 = p[d + 1], p2 = p[d + 2], p3 = p[d + 3];
        for (int64_t i = 0; i < length; i++) {
            a[i] += q0 * k0[i] + q1 * k1[i] + q2 * k2[i] + q3 * k3[i];
            b[i] += p0 * k0[i] + p1 * k1[i] + p2 * k2[i] + p3 * k3[i];
        }
    }
}

/* Scores become weights that are not yet divided by their sum; gives one over that sum. */
static float weigh(float *restrict scores, int64_t length) {
    float top = scores[0], sum = 0;
    for (int64_t i = 1; i < length; i++) top = scores[i] > top ? scores[i] : top;
    for (int64_t i = 0; i < length; i++) {
        scores[i] = exponential(scores[i] - top);
        sum += scores[i];
    }
    return 1.0f / sum;
}

/* Adds values [position, dim] under the weights of two queries. */
static void mix(float *restrict out, float *restrict other, const float *restrict w, const float *restrict y,
                const float *restrict values, int64_t dim, int64_t length) {
    for (int64_t first = 0; first < dim; first += BLOCK) {
        float w0[BLOCK] = {0}, w1[BLOCK] = {0}, y0[BLOCK] = {0}, y1[BLOCK] = {0};
        const float *v = values + first;
        int64_t i = 0;
        for (; i + 2 <= length; i += 2, v += 2 * dim)
            for (int d = 0; d < BLOCK; d++) {
                w0[d] += w[i] * v[d], w1[d] += w[i + 1] * v[dim + d];
                y0[d] += y[i] * v[d], y1[d] += y[i + 1] * v[dim + d];
            }
        for (; i < length; i++, v += dim)
            for (int d = 0; d < BLOCK; d++) w0[d] += w[i] * v[d], y0[d] += y[i] * v[d];
        for (int d = 0; d < BLOCK; d++) out[first + d] += w0[d] + w1[d], other[first + d] += y0[d] + y1[d];
    }
}

/* Pools are [entry, head, dim, position] for keys and [entry, head, position, dim] for values. */
struct pool {
    float *keys, *values;
    int64_t positions;
};

/* Matrices are in panels, biases padded to whole ones; a bias or norm of heads may be null. */
struct layer {
    const float *attention_norm, *qkv, *qkv_bias, *head_norms, *output, *output_bias;
    const float *mlp_norm, *gates_ups, *gates_ups_bias, *down, *down_bias; /* a panel has gates, then their ups */
    struct pool own, prompt;
    float attention_eps, head_eps, mlp_eps, scaling;
};

struct step {
    int64_t rows, hidden, inner, vocabulary, kv_heads, group, dim; /* group: queries of one KV head */
    int64_t threads;                                               /* `scratch` has room for so many */
    int64_t first, last;                                           /* layers to run */
    const struct layer *layers;
    const float *norm, *head, *head_bias;
    const float *cosines, *signed_sines;            /* [row, dim] */
    const int64_t *own_at, *slots, *prompt_lengths; /* by row, by row, by slot */
    float *x;                                       /* [row, hidden], the residual stream */
    float *states, *logits;                         /* null unless the last layer is among those to run */
    float *scratch;
    int64_t scratch_floats; /* of one thread */
    float eps;
};

/* ---- products ---- */

enum what { STORE, ADD, GATE };

/* `tall` rows of a times one panel; only `rows` of them are wanted, and of these `columns` numbers. */
static inline __attribute__((always_inline)) void tile(const int tall, const enum what what, int64_t rows,
                                                       int64_t depth, const float *restrict a,
                                                       const float *restrict panel, const float *bias,
                                                       float *restrict out, int64_t stride, int64_t columns) {
    vec sums[TALL][2];
    const vec none = {0};
#pragma GCC unroll 8
    for (int i = 0; i < tall; i++) {
        sums[i][0] = bias ? *(const vec *)bias : none;
        sums[i][1] = bias ? *(const vec *)(bias + LANES) : none;
    }
    for (int64_t k = 0; k < depth; k++) {
        vec left = *(const vec *)(panel + PANEL * k), right = *(const vec *)(panel + PANEL * k + LANES);
#pragma GCC unroll 8
        for (int i = 0; i < tall; i++) {
            sums[i][0] += a[i * depth + k] * left;
            sums[i][1] += a[i * depth + k] * right;
        }
    }
    float found[TALL][PANEL];
#pragma GCC unroll 8
    for (int i = 0; i < tall; i++) {
        *(vec *)found[i] = sums[i][0];
        *(vec *)(found[i] + LANES) = sums[i][1];
    }
    for (int64_t i = 0; i < rows && i < tall; i++) {
        float *to = out + i * stride, *from = found[i];
        if (what == STORE) memcpy(to, from, (size_t)columns * sizeof(float));
        if (what == ADD)
            for (int64_t c = 0; c < columns; c++) to[c] += from[c];
        if (what == GATE)
            for (int c = 0; c < LANES; c++) to[c] = from[c] / (1.0f + exponential(-from[c])) * from[LANES + c];
    }
}

/* a [rows, depth] times a matrix of so many columns; a has memory for whole tiles. */
static inline __attribute__((always_inline)) void multiply(const enum what what, int64_t rows, int64_t depth,
                                                           int64_t columns, const float *a, const float *matrix,
                                                           const float *bias, float *out, int64_t stride) {
    int64_t wide = what == GATE ? LANES : PANEL; /* columns that a panel gives */
    for (int64_t first = 0; first < columns; first += wide) {
        int64_t index = first / wide, left = columns - first < wide ? columns - first : wide;
        const float *panel = matrix + index * PANEL * depth, *its_bias = bias ? bias + index * PANEL : 0;
        int64_t row = 0;
        for (; rows - row > FEW; row += TALL)
            tile(TALL, what, rows - row, depth, a + row * depth, panel, its_bias, out + row * stride + first, stride,
                 left);
        if (row < rows)
            tile(FEW, what, rows - row, depth, a + row * depth, panel, its_bias, out + row * stride + first, stride,
                 left);
    }
}

static void normalise(int64_t rows, int64_t dim, const float *x, const float *weight, float eps, float *out) {
    for (int64_t row = 0; row < rows; row++, x += dim, out += dim) {
        float f = root_mean_square(x, dim, eps);
        for (int64_t d = 0; d < dim; d++) out[d] = x[d] * f * weight[d];
    }
}

/* ---- attention ---- */

/* One KV head of one row: the new key and value are stored, its queries attend to prompt and row under one softmax.
 * x is the row's [queries then keys then values, dim], `to` its [query, dim]. */
static void attend_head(const struct step *s, const struct layer *l, int64_t row, int64_t head, const float *x,
                        float *to, float *scratch) {
    int64_t dim = s->dim, heads = s->kv_heads * s->group, even = (s->group + 1) / 2 * 2, slot = s->slots[row];
    int64_t at = s->own_at[row], shared = s->prompt_lengths[slot], total = shared + at + 1;
    int64_t own = (row * s->kv_heads + head) * dim * l->own.positions;
    int64_t prompt = (slot * s->kv_heads + head) * dim * l->prompt.positions;
    float *keys = l->own.keys + own, *values = l->own.values + own;
    const float *cosines = s->cosines + row * dim, *sines = s->signed_sines + row * dim, *norms = l->head_norms;
    float *k = scratch, *q = k + dim, *out = q + even * dim, *scores = out + even * dim;
    for (int64_t j = 0; j < AHEAD; j++) fetch(keys + j * l->own.positions, at);
    for (int64_t g = 0; g < even; g++) { /* an odd group computes its last query twice */
        int64_t query = head * s->group + (g < s->group ? g : g - 1);
        const float *norm = norms ? norms + query * dim : 0;
        place(q + g * dim, x + query * dim, norm, l->head_eps, cosines, sines, dim, l->scaling);
    }
    int64_t key = heads + head;
    place(k, x + key * dim, norms ? norms + key * dim : 0, l->head_eps, cosines, sines, dim, 1.0f);
    memset(out, 0, (size_t)(even * dim) * sizeof(float));
    for (int64_t g = 0; g < even; g += 2) {
        float *a = scores, *b = scores + total, *qa = q + g * dim, *qb = qa + dim, last_a = 0, last_b = 0;
        score(a, b, qa, qb, l->prompt.keys + prompt, l->prompt.positions, dim, shared, 0, 0);
        score(a + shared, b + shared, qa, qb, keys, l->own.positions, dim, at, values, at * dim);
        for (int64_t d = 0; d < dim; d++) last_a += qa[d] * k[d], last_b += qb[d] * k[d];
        a[total - 1] = last_a, b[total - 1] = last_b;
        if (g == 0) {
            for (int64_t d = 0; d < dim; d++) keys[d * l->own.positions + at] = k[d];
            memcpy(values + at * dim, x + (key + s->kv_heads) * dim, (size_t)dim * sizeof(float));
        }
        float of_a = weigh(a, total), of_b = weigh(b, total), *out_a = out + g * dim, *out_b = out_a + dim;
        mix(out_a, out_b, a, b, l->prompt.values + prompt, dim, shared);
        mix(out_a, out_b, a + shared, b + shared, values, dim, at + 1);
        for (int64_t d = 0; d < dim; d++) out_a[d] *= of_a, out_b[d] *= of_b;
    }
    memcpy(to + head * s->group * dim, out, (size_t)(s->group * dim) * sizeof(float));
}

/* ---- a step ---- */

static void run_layer(const struct step *s, const struct layer *l, int64_t row, int64_t rows, float *scratch) {
    int64_t hidden = s->hidden, queries = s->kv_heads * s->group * s->dim, all = queries + 2 * s->kv_heads * s->dim;
    float *x = s->x + row * hidden;
    float *normed = scratch, *qkv = normed + TOGETHER * hidden, *attended = qkv + TOGETHER * all;
    float *gated = attended + TOGETHER * queries, *rest = gated + TOGETHER * s->inner;
    normalise(rows, hidden, x, l->attention_norm, l->attention_eps, normed);
    multiply(STORE, rows, hidden, all, normed, l->qkv, l->qkv_bias, qkv, all);
    for (int64_t head = 0; head < s->kv_heads; head++) /* outside: a head's prompt stays in the cache for all rows */
        for (int64_t i = 0; i < rows; i++)
            attend_head(s, l, row + i, head, qkv + i * all, attended + i * queries, rest);
    multiply(ADD, rows, queries, hidden, attended, l->output, l->output_bias, x, hidden);
    normalise(rows, hidden, x, l->mlp_norm, l->mlp_eps, normed);
    multiply(GATE, rows, hidden, s->inner, normed, l->gates_ups, l->gates_ups_bias, gated, s->inner);
    multiply(ADD, rows, s->inner, hidden, gated, l->down, l->down_bias, x, hidden);
}

static void finish(const struct step *s, int64_t row, int64_t rows, float *normed) {
    int64_t hidden = s->hidden, vocabulary = s->vocabulary;
    normalise(rows, hidden, s->x + row * hidden, s->norm, s->eps, normed);
    memcpy(s->states + row * hidden, normed, (size_t)(rows * hidden) * sizeof(float));
    multiply(STORE, rows, hidden, vocabulary, normed, s->head, s->head_bias, s->logits + row * vocabulary, vocabulary);
}

void decode(const struct step *s) {
#pragma omp parallel num_threads((int)s->threads)
    {
        int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num(), parts = (s->rows + FEW - 1) / FEW;
        int64_t begin = parts * thread / threads * FEW, end = parts * (thread + 1) / threads * FEW;
        float *scratch = s->scratch + thread * s->scratch_floats;
        end = end < s->rows ? end : s->rows;
        for (int64_t layer = s->first; layer < s->last; layer++)
            for (int64_t row = begin; row < end; row += TOGETHER)
                run_layer(s, s->layers + layer, row, end - row < TOGETHER ? end - row : TOGETHER, scratch);
        for (int64_t row = begin; s->states && row < end; row += TOGETHER)
            finish(s, row, end - row < TOGETHER ? end - row : TOGETHER, scratch);
    }
}
