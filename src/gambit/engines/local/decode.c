/* What a decode step does between its matrix products, each in one pass over memory; float32, one token a row.
 *
 * Every torch operation of a step runs on cold caches, since a step streams all weights, keys and values: two dozen
 * small operations a layer then cost as much as the products. Rows are independent here: no result depends on the
 * number of threads.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 32 /* floats of a head that are summed in registers; a head must be a multiple of it */
#define AHEAD 8  /* dimensions of keys asked for before they are needed: rows are too short for the hardware to guess */

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

struct step {
    int64_t rows, kv_heads, group, dim; /* group: queries of one KV head */
    int64_t threads;                    /* `scratch` has room for so many */
    const float *qkv;                   /* [row, queries then keys then values, dim] */
    const float *norm;                  /* [queries then keys, dim], or null */
    const float *cosines, *signed_sines; /* [row, dim] */
    struct pool own, prompt;
    const int64_t *own_at, *slots, *prompt_lengths; /* by row, by row, by slot */
    float *out;                                     /* [row, query, dim] */
    float *scratch;
    int64_t scratch_floats; /* of one thread */
    float eps, scaling;
};

/* One KV head of one row: the new key and value are stored, its queries attend to prompt and row under one softmax. */
static void attend_head(const struct step *s, int64_t row, int64_t head, float *scratch) {
    int64_t dim = s->dim, heads = s->kv_heads * s->group, even = (s->group + 1) / 2 * 2, slot = s->slots[row];
    int64_t at = s->own_at[row], shared = s->prompt_lengths[slot], total = shared + at + 1;
    int64_t own = (row * s->kv_heads + head) * dim * s->own.positions;
    int64_t prompt = (slot * s->kv_heads + head) * dim * s->prompt.positions;
    float *keys = s->own.keys + own, *values = s->own.values + own;
    const float *x = s->qkv + row * (heads + 2 * s->kv_heads) * dim;
    const float *cosines = s->cosines + row * dim, *sines = s->signed_sines + row * dim;
    float *k = scratch, *q = k + dim, *out = q + even * dim, *scores = out + even * dim;
    for (int64_t j = 0; j < AHEAD; j++) fetch(keys + j * s->own.positions, at);
    for (int64_t g = 0; g < even; g++) { /* an odd group computes its last query twice */
        int64_t query = head * s->group + (g < s->group ? g : g - 1);
        const float *norm = s->norm ? s->norm + query * dim : 0;
        place(q + g * dim, x + query * dim, norm, s->eps, cosines, sines, dim, s->scaling);
    }
    int64_t key = heads + head;
    place(k, x + key * dim, s->norm ? s->norm + key * dim : 0, s->eps, cosines, sines, dim, 1.0f);
    memset(out, 0, (size_t)(even * dim) * sizeof(float));
    for (int64_t g = 0; g < even; g += 2) {
        float *a = scores, *b = scores + total, *qa = q + g * dim, *qb = qa + dim, last_a = 0, last_b = 0;
        score(a, b, qa, qb, s->prompt.keys + prompt, s->prompt.positions, dim, shared, 0, 0);
        score(a + shared, b + shared, qa, qb, keys, s->own.positions, dim, at, values, at * dim);
        for (int64_t d = 0; d < dim; d++) last_a += qa[d] * k[d], last_b += qb[d] * k[d];
        a[total - 1] = last_a, b[total - 1] = last_b;
        if (g == 0) {
            for (int64_t d = 0; d < dim; d++) keys[d * s->own.positions + at] = k[d];
            memcpy(values + at * dim, x + (key + s->kv_heads) * dim, (size_t)dim * sizeof(float));
        }
        float of_a = weigh(a, total), of_b = weigh(b, total), *out_a = out + g * dim, *out_b = out_a + dim;
        mix(out_a, out_b, a, b, s->prompt.values + prompt, dim, shared);
        mix(out_a, out_b, a + shared, b + shared, values, dim, at + 1);
        for (int64_t d = 0; d < dim; d++) out_a[d] *= of_a, out_b[d] *= of_b;
    }
    memcpy(s->out + (row * heads + head * s->group) * dim, out, (size_t)(s->group * dim) * sizeof(float));
}

void attend(const struct step *s) {
#pragma omp parallel num_threads((int)s->threads)
    {
        int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        int64_t first = s->rows * thread / threads, last = s->rows * (thread + 1) / threads;
        /* Heads outside: the prompt of one head stays in the cache for all rows. */
        for (int64_t head = 0; head < s->kv_heads; head++)
            for (int64_t row = first; row < last; row++)
                attend_head(s, row, head, s->scratch + thread * s->scratch_floats);
    }
}

void rms_norm(int64_t rows, int64_t dim, const float *x, const float *weight, float eps, float *out) {
#pragma omp parallel for schedule(static) if (rows * dim > 1 << 16)
    for (int64_t row = 0; row < rows; row++) {
        float f = root_mean_square(x + row * dim, dim, eps);
        for (int64_t d = 0; d < dim; d++) out[row * dim + d] = x[row * dim + d] * f * weight[d];
    }
}

/* gates_ups [row, gates then ups] */
void gated_silu(int64_t rows, int64_t dim, const float *gates_ups, float *out) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const float *gates = gates_ups + row * 2 * dim, *ups = gates + dim;
        for (int64_t d = 0; d < dim; d++) out[row * dim + d] = gates[d] / (1.0f + exponential(-gates[d])) * ups[d];
    }
}
