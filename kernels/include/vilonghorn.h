/* The C interface of the kernels: plain structs of pointers and strides, without torch or Python.
 *
 * Shapes: G directions, B batch, L length, D channels, H heads, N states, S channel splits, R dt_rank, P = R + 2 N.
 * Inputs (VlInput) have strides in elements; their last dimension is contiguous. A null pointer means that an
 * optional tensor is absent. Activations (x, dt, k, q, z, y, dy, dx, ddt, dz) have type `dtype`: float or double in the
 * CPU library, float or bfloat16 in the CUDA library. Unless a field says otherwise, all other tensors are contiguous,
 * and double when dtype is VL_FLOAT64, else float.
 */
#ifndef VILONGHORN_H
#define VILONGHORN_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { VL_ABI = 27 }; /* Increase it with every change of a struct, function or tensor: the caller compares it. */
/* VL_NONE, without a recurrence, is for VlMambaInner and VlBlock on the CPU: y is the mean over the directions of the
 * convolution with SiLU, times silu(z). x_proj, dt_proj, dt_bias, A and D are absent; states, dt_rank and heads are 0.
 */
enum { VL_LONGHORN = 0, VL_LONGHORN_EXACT = 1, VL_MAMBA = 2, VL_NONE = 3 };
/* What functions return where they do not implement the rule, or do not take a size. */
enum { VL_UNKNOWN_RULE = -1, VL_INVALID = -2 };
static const char *const VL_RULES[] = {"longhorn", "longhorn_exact", "mamba", "none"};
/* The number of a rule by its name. */
static inline int vl_rule(const char *name) {
  for (int rule = 0; rule <= VL_NONE; rule++)
    if (!strcmp(name, VL_RULES[rule])) return rule;
  return VL_UNKNOWN_RULE;
}
enum { VL_FLOAT32 = 0, VL_FLOAT64 = 1, VL_BFLOAT16 = 2 };
enum { VL_MAX_STATES = 64, VL_CUDA_MAX_STATES = 16, VL_CUDA_MAX_NORM = 1024, VL_MAX_CONV = 64 };

typedef struct {
  const void *data;
  int64_t direction, batch, step; /* strides */
} VlInput;

typedef struct {
  int64_t directions, batch, length, channels, states;
  int64_t chunk;          /* steps between two saved states */
  int64_t channel_splits; /* number of jobs that share the channels of a sequence */
  int32_t rule, mean;     /* mean: y is the mean over the directions */
  int32_t dtype, threads;
  int32_t channels_first;    /* CPU: the channels come before the tokens, which are contiguous, in x, dt, z, dy, whose
                                `step` is the stride between channels, and in y, dx, ddt, (B, G, D, L), dz, (B, D, L).
                                Without mean, and with z only for one direction */
  const uint8_t *reverse;    /* (G): not 0 where the scan runs from the last step to the first */
  VlInput x, dt, k, q;       /* x, dt: (G, B, L, D); k, q: (G, B, L, N) */
  VlInput z;                 /* (B, L, D), optional */
  const void *A;             /* (G, D, N), VL_MAMBA only */
  const void *D, *dt_bias;   /* (G, D), optional */
  const void *initial_state; /* (G, B, N, D), optional: before the first step; zeros if absent */
  void *y;            /* (G, B, L, D), with mean (B, L, D). CPU backward with z and mean: optional float output */
  void *saved_states; /* (G, B, ceil(L / chunk), N, padded D), private layout; optional in forward; CUDA: bfloat16
                         for VL_BFLOAT16 except with VL_LONGHORN_EXACT, else float */
  void *final_state;  /* (G, B, N, D), optional: after the last step */
  void *accumulator;  /* CUDA: (B, L, D) float workspace where G > 1, in backward (B, L, dz_step) */
  /* backward only */
  VlInput dy;               /* like y; direction stride 0 with mean */
  const void *dfinal_state; /* (G, B, N, D), optional */
  void *dx, *ddt;           /* (G, B, L, D) */
  void *dk, *dq;            /* CPU: (S, G, B, L, N): the caller sums over S. CUDA: (G, B, L, N), of `dtype` */
  int64_t dk_step;          /* CUDA: stride between the tokens of dk, and of dq; N if contiguous */
  void *dz;                 /* (B, L, D), optional */
  int64_t dz_step;          /* stride between the tokens of dz; D if contiguous */
  void *dA, *dD, *ddt_bias; /* (G, D, N), (G, D), (G, D), optional */
  void *dinitial_state;     /* (G, B, N, D), optional */
  void *partials;           /* CUDA: vl_cuda_scan_partials() floats of workspace */
} VlScan;

/* A convolution over a grid of patches, with zeros around it. The tokens are the patches in raster order; a further one
 * is a class token before patch rows * columns / 2, of which only the middle tap is used. */
typedef struct {
  int64_t rows, columns;    /* rows 0: no grid, the convolution is causal */
  int64_t height;           /* of the filter, odd; its width is odd too */
  const int32_t *neighbors; /* set by the CPU library: (L, d_conv), 1 + the token under a tap, 0 for none */
} VlConvGrid;

/* A mixer without its input and output projections: convolution with SiLU, x_proj, dt_proj, scan, gate.
 * scan.x is the input of the convolution, with direction stride 0. scan.dt, k, q and their gradients are absent. With
 * channel_splits > 1, scan.dx is a float workspace for the gradient of the convolution's output, (G, B, L, D). The
 * channels of a head, D / H consecutive ones, share the rows of dt_proj and of scan.dt_bias, which is (G, H). */
typedef struct {
  VlScan scan;
  int64_t d_conv, dt_rank, num_heads;
  VlConvGrid conv_grid;
  const void
      *conv_weight; /* (G, D, d_conv): the last tap applies to the current step; with a grid (G, D, height, width) */
  const void *conv_bias;   /* (G, D) */
  const void *x_proj;      /* (G, P, D): rows of the low-rank dt, k and q */
  const void *dt_proj;     /* (G, H, R) */
  const void *drop_scales; /* (B), optional: factors of y */
  void *projected;         /* (G, B, L, P): written by forward, read by backward */
  /* backward only */
  void *dprojected;                                     /* (S, G, B, L, P): workspace */
  void *dx;                                             /* (B, L, D), with token stride scan.dz_step */
  void *dconv_weight, *dconv_bias, *dx_proj, *ddt_proj; /* like the weights */
} VlMambaInner;

typedef struct {
  int64_t directions, batch, length, channels, d_conv;
  int64_t channel_splits;
  int32_t dtype, threads;
  const uint8_t *reverse;
  VlInput x;            /* (B, L, D): direction stride 0 */
  VlConvGrid conv_grid; /* CUDA: without a class token, for a weight of (1, D, 3, 3); `reverse` is not used then */
  VlInput z;            /* CUDA, with a grid: (B, L, D), optional: y is multiplied by silu(z) */
  const void *weight;   /* (G, D, d_conv): the last tap applies to the current step */
  const void *bias;     /* (G, D) */
  void *y;              /* (G, B, L, D) */
  /* backward only */
  VlInput dy;
  void *dx, *dz;         /* (B, L, D); dz with z */
  int64_t dx_step;       /* stride between the tokens of dx, and of dz; D if contiguous */
  void *dweight, *dbias; /* (G, D, d_conv), (G, D) */
  void *partials;        /* CUDA: vl_cuda_conv_rows() * G * D * (d_conv + 1) floats of workspace */
} VlConv;

typedef struct {
  int64_t batch, channels; /* rows and columns */
  int32_t dtype, threads;
  double eps;
  const void *x;      /* (batch, channels) */
  const void *weight; /* (channels) */
  void *y;
  void *scale; /* CPU: (batch) float: written by forward, read by backward */
  /* backward only */
  const void *dy;
  const void *add; /* (batch, channels), optional: added to dx */
  void *dx;
  void *dweight;    /* (channels) */
  int32_t dy_dtype; /* CUDA: of dy; on the CPU it is `dtype` */
  void *partials;   /* CUDA: (vl_cuda_norm_rows(), channels) floats of workspace */
} VlNorm;

/* out = a b + add for float matrices that are not empty. Each factor is contiguous along its rows or its columns. */
typedef struct {
  int64_t rows, columns, depth;
  int32_t threads;
  const void *a, *b;
  int64_t a_row, a_depth, b_depth, b_column; /* strides in elements; one stride of each factor is 1 */
  const void *add;                           /* (rows, columns), contiguous like out; optional */
  void *out;
  const void *b_scale; /* (columns), optional: b is int8 and stands for b * b_scale; a, whose rows are contiguous, is
                          rounded to int8 row by row; b is contiguous along the depth */
  int32_t bf16_parts;  /* bfloat16 values, 1 or 2, whose sum stands for a float of a and b; 0, and without AMX: float */
} VlGemm;

/* A float residual block: mid = x + inner(norm(x) in_proj^T) out_proj^T, then with a gated MLP of `hidden` channels
 * out = mid + (silu(g) * v) mlp_out_proj^T with (g, v) = norm(mid) mlp_in_proj^T, else out = mid. drop_scales are
 * factors of what a sample adds to the stream. */
typedef struct {
  int64_t batch, length, dim;
  int64_t directions, channels, states, d_conv, dt_rank, num_heads, chunk, channel_splits; /* as in VlMambaInner */
  int64_t hidden;                                                                          /* 0: no MLP */
  int32_t rule, threads, bf16_parts; /* bf16_parts: as in VlGemm */
  int32_t save;                      /* not 0: forward writes what backward reads */
  double eps, mlp_eps;
  VlConvGrid conv_grid; /* as in VlMambaInner */
  const uint8_t *reverse;
  /* VL_BLOCK_TENSORS from x to drop_scales, in the order of the operator's arguments. */
  const void *x;                                                            /* (B, L, dim) */
  const void *norm_weight;                                                  /* (dim) */
  const void *in_proj;                                                      /* (2 D, dim) */
  const void *conv_weight, *conv_bias, *x_proj, *dt_proj, *dt_bias, *A, *D; /* as in VlMambaInner */
  const void *out_proj;                                                     /* (dim, D) */
  const void *mlp_norm_weight;                                              /* (dim) */
  const void *mlp_in_proj;                                                  /* (2 hidden, dim): rows of g, then v */
  const void *mlp_out_proj;                                                 /* (dim, hidden) */
  const void *drop_scales; /* (1 + (hidden > 0), B), optional: of the mixer, of the MLP */
  void *out;               /* (B, L, dim); with an MLP it may be x */
  void *xz, *projected;    /* (B, L, 2 D), (G, B, L, P) */
  void *saved_states;      /* as in VlScan; with `save` */
  void *mid;               /* (B, L, dim); with an MLP */
  void *gv;                /* (B, L, 2 hidden); with an MLP and `save` */
  /* backward only: the gradient of out, and those of the tensors. Those of in_proj, out_proj, mlp_in_proj and
   * mlp_out_proj are optional. */
  const void *dout;
  void *dx, *dnorm_weight, *din_proj, *dconv_weight, *dconv_bias, *dx_proj, *ddt_proj, *ddt_bias, *dA, *dD, *dout_proj;
  void *dmlp_norm_weight, *dmlp_in_proj, *dmlp_out_proj;
  /* Forward only, optional: with the scales of in_proj (2 D), out_proj (dim), mlp_in_proj (2 hidden) and mlp_out_proj
   * (dim) these weights are int8, as b of VlGemm. */
  const void *in_proj_scale, *out_proj_scale, *mlp_in_proj_scale, *mlp_out_proj_scale;
  const void *packed; /* forward only, optional: these weights as vl_block_pack has written them */
} VlBlock;
enum { VL_BLOCK_TENSORS = 15 };

/* Tokens of a map, merge x merge of them side by side as one row, which is normed if norm_weight is given: their
 * product with the weight, plus bias. Floats. */
typedef struct {
  int64_t batch, rows, columns, out_channels; /* of out */
  int64_t channels, merge;                    /* of x */
  int32_t threads;
  double eps;
  const void *x;           /* (batch, rows * merge, columns * merge, channels) */
  const void *norm_weight; /* (merge * merge * channels), optional */
  const void *weight;      /* (out_channels, merge * merge * channels) */
  const void *bias;        /* (out_channels), optional */
  const void *scale;       /* (out_channels), optional: weight is int8, as b of VlGemm */
  const void *packed;      /* optional: weight as vl_linear_pack has written it */
  void *out;               /* (batch, rows, columns, out_channels) */
} VlLinear;
/* Images to a normed map: two convolutions of 3x3 with zeros around their input, with a SiLU between them. Floats. */
typedef struct {
  int64_t batch, channels, rows, columns; /* of images */
  int64_t hidden, dim, stride1, stride2;
  int32_t threads;
  double eps;
  const void *images;          /* (batch, channels, rows, columns) */
  const void *weight1, *bias1; /* (hidden, channels, 3, 3), (hidden) */
  const void *weight2, *bias2; /* (dim, hidden, 3, 3), (dim) */
  const void *norm_weight;     /* (dim) */
  const void *scale;  /* (dim), optional: weight2 is int8 with a scale for each channel of out, and its input is
                         rounded to bytes with one scale for three rows */
  const void *packed; /* optional: the weights as vl_stem_pack has written them */
  void *out;          /* (batch, Y, X, dim); a stride makes (side - 1) / stride + 1 of a side */
} VlStem;

/* An input of an operator in an exported file, contiguous. */
typedef struct {
  const void *data;
  int64_t rank; /* -1: the input is absent */
  int64_t sizes[4];
} VlTensor;
enum { VL_SCAN_INPUTS = 8, VL_BLOCK_INPUTS = 19, VL_LINEAR_INPUTS = 5, VL_STEM_INPUTS = 7 };

#ifdef _WIN32
#define VL_EXPORT __declspec(dllexport)
#else
#define VL_EXPORT __attribute__((visibility("default")))
#endif
#ifdef __cplusplus
extern "C" {
#endif
VL_EXPORT int vl_abi(void); /* VL_ABI of this library */

/* The CPU library. isa: index of an instruction set, -1 for the best one that this processor supports. Functions that
 * return int return 0, VL_UNKNOWN_RULE, VL_INVALID, or 1 if the instruction set is not available or memory ran out;
 * outputs are then undefined. */
VL_EXPORT const char *vl_error(int error);  /* why the last call on this thread failed */
VL_EXPORT int vl_isas(void);                /* number of instruction sets in this build, ascending */
VL_EXPORT const char *vl_isa_name(int isa); /* "v2", "v3", "v4", "vnni" (v4 and AVX512_VNNI), "amx" (vnni and
                                               AMX_BF16) on x86-64, else "generic", "dotprod" (of aarch64) */
VL_EXPORT int vl_isa_runs(int isa);         /* not 0 if this processor supports it */
VL_EXPORT const char *vl_threading(void);   /* "gomp" where torch's OpenMP threads are used, else "std" */
VL_EXPORT int vl_scan_forward(const VlScan *, int isa);
VL_EXPORT int vl_scan_backward(const VlScan *, int isa);
VL_EXPORT int vl_conv_forward(const VlConv *, int isa);
VL_EXPORT int vl_conv_backward(const VlConv *, int isa);
VL_EXPORT int vl_mamba_inner_forward(const VlMambaInner *, int isa);
VL_EXPORT int vl_mamba_inner_backward(const VlMambaInner *, int isa);
VL_EXPORT int vl_norm_forward(const VlNorm *, int isa);
VL_EXPORT int vl_norm_backward(const VlNorm *, int isa);
VL_EXPORT int vl_matmul(const VlGemm *, int isa);
/* stage: the index of one stage in block.cpp, -1 for all stages. */
VL_EXPORT int vl_block_forward(const VlBlock *, int stage, int isa);
VL_EXPORT int vl_block_backward(const VlBlock *, int stage, int isa);
/* Forward without a backward. The library sets chunk, channel_splits, xz, projected and mid. */
VL_EXPORT int vl_scan_infer(const VlScan *, int isa);
VL_EXPORT int vl_block_infer(const VlBlock *, int isa);
/* Writes in_proj, out_proj, mlp_in_proj and mlp_out_proj in the order in which products of this instruction set read
 * them, for many calls with the same weights; else each call does this anew. `packed` is aligned to 64 bytes. */
VL_EXPORT int64_t vl_block_packed_bytes(const VlBlock *, int isa);
VL_EXPORT int vl_block_pack(const VlBlock *, void *packed, int isa);
/* packed: as of a block. */
VL_EXPORT int vl_linear_forward(const VlLinear *, int isa);
VL_EXPORT int64_t vl_linear_packed_bytes(const VlLinear *, int isa);
VL_EXPORT int vl_linear_pack(const VlLinear *, void *packed, int isa);
VL_EXPORT int vl_stem_forward(const VlStem *, int isa);
VL_EXPORT int64_t vl_stem_packed_bytes(const VlStem *, int isa);
VL_EXPORT int vl_stem_pack(const VlStem *, void *packed, int isa);
/* Checks the inputs of an operator against each other and the rule, and sets the sizes and inputs of the struct; of a
 * scan x to dt_bias, of a block x to drop_scales and the scales. `flags`: the number of flags in `reverse`. */
VL_EXPORT int vl_scan_set(VlScan *, const VlTensor *inputs, int64_t flags);
VL_EXPORT int vl_block_set(VlBlock *, const VlTensor *inputs, int64_t flags);
VL_EXPORT int vl_linear_set(VlLinear *, const VlTensor *inputs); /* x to bias, then scale; after merge */
VL_EXPORT int vl_stem_set(VlStem *, const VlTensor *inputs);     /* images to scale; after the strides */

/* The CUDA library. All tensors are in device memory and not empty. In a scan x, dt, z and dy are aligned to two
 * elements, their strides and the channels are even, their step strides are below 2^31, and there are at most 64
 * directions and VL_CUDA_MAX_STATES states. Kernels are queued on `stream`. Functions that return int return 0,
 * VL_UNKNOWN_RULE or an error of the CUDA runtime. */
VL_EXPORT int vl_cuda_check(int device); /* an error if the device cannot run this build */
VL_EXPORT const char *vl_cuda_error(int error);
VL_EXPORT int64_t vl_cuda_scan_partials(const VlScan *); /* the size of `partials` */
VL_EXPORT int vl_cuda_scan_forward(const VlScan *, int device, void *stream);
VL_EXPORT int vl_cuda_scan_backward(const VlScan *, int device, void *stream);
/* The convolution is over a grid, or has four taps and one direction or two opposite ones. The weight is aligned to 16
 * bytes. It takes every stride; with other tensors aligned to 16 bytes, too, it is fastest. */
VL_EXPORT int64_t vl_cuda_conv_rows(const VlConv *); /* the number of rows of `partials` */
VL_EXPORT int vl_cuda_conv_forward(const VlConv *, int device, void *stream);
VL_EXPORT int vl_cuda_conv_backward(const VlConv *, int device, void *stream);
/* The norm has a backward only, for a multiple of four channels, up to VL_CUDA_MAX_NORM. Its tensors are contiguous and
 * aligned to four elements; the weight and its gradient are float. */
VL_EXPORT int64_t vl_cuda_norm_rows(const VlNorm *);
VL_EXPORT int vl_cuda_norm_backward(const VlNorm *, int device, void *stream);
#ifdef __cplusplus
}
#endif
#endif
