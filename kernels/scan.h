/* The C interface of the kernels: plain structs of pointers and strides, free of torch and Python.
 *
 * Layout is (groups, batch, length, channels): a group is one direction of the scan. Input tensors carry strides in
 * elements; their channels (states for k and q) are contiguous. Outputs are contiguous. Null pointers stand for absent
 * optional tensors. Activations (x, dt, k, q, z, y, dy, dx, ddt, dz) are of the call's type, the others float, or double
 * beside double activations. The CUDA library knows all dtypes but VL_FLOAT64.
 */
#ifndef VILONGHORN_SCAN_H
#define VILONGHORN_SCAN_H
#include <stdint.h>

enum { VL_ABI = 8 }; /* raise it with every change here; the caller compares it with that of the library */
enum { VL_LONGHORN = 0, VL_LONGHORN_EXACT = 1, VL_MAMBA = 2 };
enum { VL_FLOAT32 = 0, VL_FLOAT64 = 1, VL_BFLOAT16 = 2, VL_FLOAT16 = 3 };
enum { VL_MAX_STATES = 64 };

typedef struct {
  const void *data;
  int64_t group, batch, step; /* strides */
} VlInput;

typedef struct {
  int64_t groups, batch, length, channels, states;
  int64_t chunk;            /* steps between two checkpoints */
  int64_t parts;            /* how many jobs share the channels of a sequence */
  int32_t rule, mean;       /* mean: one y, averaged over the groups */
  int32_t dtype, threads;
  const uint8_t *reverse;   /* (groups): scans from the last step to the first where not 0 */
  VlInput x, dt, k, q;      /* (groups, batch, length, channels) and (..., states) */
  VlInput z;                /* (batch, length, channels), optional */
  const void *A;            /* (groups, channels, states), VL_MAMBA only */
  const void *D, *dt_bias;  /* (groups, channels), optional */
  void *y;                  /* (groups, batch, length, channels), or without groups under mean; CPU, backward with z and mean: made again if asked, of float */
  void *checkpoints;        /* (groups, batch, ceil(length / chunk), states, channels padded to LANES of the backend), in an order of the library's own; optional in forward */
  void *sums;               /* (batch, length, channels), in a mixer's backward 2 channels (dx, dz), of float: workspace for what directions add to one result (groups > 1); the CPU library needs it where that is of a shorter type */
  /* backward only */
  VlInput dy;               /* as y; group stride 0 under mean */
  void *dx, *ddt;           /* (groups, batch, length, channels) */
  void *dk, *dq;            /* (parts, groups, batch, length, states): the caller sums over parts */
  void *dz;                 /* (batch, length, channels), optional */
  int64_t dz_step;          /* between the tokens of dz: channels where it is contiguous */
  void *dA, *dD, *ddt_bias; /* (groups, channels[, states]), optional; the CUDA library leaves one for each sequence, (batch, ...) */
} VlScan;

/* How the CUDA library splits a scan of VL_SPLIT_STATES over time: into segments of `span` steps of the image, a multiple of
 * `chunk`, of which the last may be shorter. span 0: not at all. dA, dD and ddt_bias then have a row for each segment,
 * (batch, segments, groups, ...). */
enum { VL_SPLIT_STATES = 16 };
typedef struct {
  int64_t span;
  void *summaries; /* (groups, batch, segments, runs, states, channels padded) of float; runs: 17 of VL_LONGHORN_EXACT, else 2 */
  void *starts;    /* (groups, batch, segments, states, channels padded) of float */
} VlSplit;

/* What a mixer does between its input and output projections: convolution with SiLU, projections, scan, gate.
 * In `scan`, x is the convolution's input (group stride 0); dt, k, q and their gradients are absent. Where parts > 1, its dx
 * is a workspace of float for the gradient of the convolution's output, (groups, batch, length, channels). */
typedef struct {
  VlScan scan;
  int64_t taps, rank;
  const void *conv_weight;  /* (groups, channels, taps): the last tap meets the present step */
  const void *conv_bias;    /* (groups, channels) */
  const void *x_proj;       /* (groups, rank + 2 states, channels): rows of dt's factor, k and q */
  const void *dt_proj;      /* (groups, channels, rank) */
  void *projected;          /* (groups, batch, length, rank + 2 states): forward writes it, backward reads it */
  /* backward only */
  void *dprojected;         /* (parts, groups, batch, length, rank + 2 states): workspace */
  void *dx;                 /* (batch, length, channels), tokens dz_step apart */
  void *dconv_weight, *dconv_bias, *dx_proj, *ddt_proj; /* as the weights */
} VlMix;

typedef struct {
  int64_t groups, batch, length, channels, taps;
  int64_t parts;
  int32_t dtype, threads;
  const uint8_t *reverse;
  VlInput x;                /* (batch, length, channels): group stride 0 */
  const void *weight;       /* (groups, channels, taps): the last tap meets the present step */
  const void *bias;         /* (groups, channels) */
  void *y;                  /* (groups, batch, length, channels) */
  /* backward only */
  VlInput dy;
  void *dx;                 /* (batch, length, channels) */
  void *dweight, *dbias;    /* (groups, channels, taps) and (groups, channels) */
} VlConv;

typedef struct {
  int64_t batch, channels;  /* rows, and numbers in each */
  int32_t dtype, threads;
  double eps;
  const void *x;            /* (batch, channels), contiguous like all of these */
  const void *weight;       /* (channels) */
  void *y;
  void *scale;              /* (batch), of float: forward writes it, backward reads it */
  /* backward only */
  const void *dy;
  const void *add;          /* (batch, channels), optional: added to dx */
  void *dx;
  void *dweight;            /* (channels) */
} VlNorm;

/* out = a b, or a b + add, for matrices of float, each factor contiguous along its rows or along its columns; nothing is empty. */
typedef struct {
  int64_t rows, columns, depth;
  int32_t threads;
  const void *a, *b;
  int64_t a_row, a_depth, b_depth, b_column; /* strides in elements, one of each factor's 1 */
  const void *add;          /* (rows, columns), contiguous like out; optional */
  void *out;
} VlMatmul;

/* A residual block of float: out = x + p out_proj^T, or without x, where p is what a mixer makes of xz = norm(x) in_proj^T. */
typedef struct {
  int64_t batch, length, dim;
  int64_t groups, channels, states, taps, rank, chunk, parts; /* of the mixer, as in VlMix */
  int32_t rule, residual;
  int32_t threads;
  double eps;
  const uint8_t *reverse;
  const void *x;            /* (batch, length, dim), contiguous */
  const void *norm_weight;  /* (dim) */
  const void *in_proj;      /* (2 channels, dim) */
  const void *conv_weight, *conv_bias, *x_proj, *dt_proj, *dt_bias, *A, *D; /* as in VlMix */
  const void *out_proj;     /* (dim, channels) */
  void *out;                /* (batch, length, dim) */
  void *xz;                 /* (batch, length, 2 channels): forward writes it, backward reads it; so the next two */
  void *projected;          /* as in VlMix */
  void *checkpoints;        /* as in VlScan */
  /* backward only */
  const void *dout;         /* (batch, length, dim), contiguous */
  void *dx;
  void *dnorm_weight, *din_proj, *dconv_weight, *dconv_bias, *dx_proj, *ddt_proj, *ddt_bias, *dA, *dD, *dout_proj; /* as the weights */
} VlBlock;

/* level: an instruction set of vl_level_name, or -1 for the best that this processor has. Returns 0, or 1 if the
 * level is not there or memory ran out (nothing is then written that may be read). */
#ifdef _WIN32
#define VL_EXPORT extern "C" __declspec(dllexport)
#else
#define VL_EXPORT extern "C" __attribute__((visibility("default")))
#endif
#ifdef __cplusplus
extern "C" {
#endif
int vl_abi(void);                      /* VL_ABI, in every library */
int vl_levels(void);                   /* how many levels this build holds, the plainest first */
const char *vl_level_name(int level);  /* "v2", "v3", "v4" on x86-64, "generic" elsewhere */
int vl_level_runs(int level);          /* whether this processor can run it */
int64_t vl_multiply_adds(int level, int64_t rounds); /* does them on the calling thread, and says how many lanes */
const char *vl_threading(void);        /* "gomp" when torch's own OpenMP pool is shared, else "std" */
int vl_scan_forward(const VlScan *, int level);
int vl_scan_backward(const VlScan *, int level);
int vl_conv_forward(const VlConv *, int level);
int vl_conv_backward(const VlConv *, int level);
int vl_mix_forward(const VlMix *, int level);
int vl_mix_backward(const VlMix *, int level);
int vl_norm_forward(const VlNorm *, int level);
int vl_norm_backward(const VlNorm *, int level);
int vl_matmul(const VlMatmul *, int level);
/* All stages of a block, in the order of block_cpu.cpp, for -1; else the one of that number. */
int vl_block_forward(const VlBlock *, int stage, int level);
int vl_block_backward(const VlBlock *, int stage, int level);

/* The CUDA library. Tensors are in the device's memory; x, dt, z and dy are aligned to two elements, their strides and
 * the channels even, their steps below 2^31; at most 64 groups; nothing is empty. Work is queued on `stream`. Returns 0 or
 * an error of the CUDA runtime. */
int vl_cuda_check(int device);                /* an error where the device cannot run this build */
const char *vl_cuda_error(int error);
int64_t vl_cuda_parts(const VlScan *);        /* the value that `parts` must have in backward */
int vl_cuda_scan_forward(const VlScan *, const VlSplit *, int device, void *stream);
int vl_cuda_scan_backward(const VlScan *, const VlSplit *, int device, void *stream);
#ifdef __cplusplus
}
#endif
#endif
