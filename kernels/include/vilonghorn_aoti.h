// The operators `vilonghorn::block` and `vilonghorn::scan` as functions of AOTInductor's C interface. Not compiled
// here: vilonghorn/export/native.py has AOTInductor compile it into a model, whose headers come first. The kernels are
// in the file VL_KERNELS, beside that of the model.
#include <dlfcn.h>
#include <torch/csrc/stable/c/shim.h>

#include "vilonghorn.h"

namespace vilonghorn {
namespace {
using torch::aot_inductor::RAIIAtenTensorHandle;

[[noreturn]] void fail(const std::string &problem) { throw std::runtime_error("vilonghorn: " + problem); }

// A function of the kernels' library. That is never closed, because its threads remain.
template <class Function> Function *kernel(const char *name) {
  static void *const library = [] {
    Dl_info model;
    dladdr((void *)fail, &model);
    std::string path = model.dli_fname;
    path.replace(path.rfind('/') + 1, std::string::npos, VL_KERNELS);
    return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  }();
  void *found = library ? dlsym(library, name) : nullptr;
  if (!found) fail(std::string("the kernels do not load: ") + dlerror());
  return (Function *)found;
}

RAIIAtenTensorHandle empty(const std::vector<int64_t> &sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  AtenTensorHandle made = nullptr;
  AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      sizes.size(), sizes.data(), strides.data(), aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), 0, &made));
  return made;
}

// A float32 tensor, or none.
struct Tensor {
  RAIIAtenTensorHandle handle;
  std::vector<int64_t> sizes;
  int64_t *strides = nullptr;
  float *data = nullptr;

  // Copies where the layout is not contiguous; `strided`: where the last dimension is not.
  explicit Tensor(AtenTensorHandle given, bool strided = false) {
    int32_t dtype = 0;
    int64_t rank = 0;
    bool fits = false;
    AtenTensorHandle same = nullptr;
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(given, &dtype));
    if (dtype != aoti_torch_dtype_float32()) fail("expected tensors of float32");
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(given, &rank));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(given, &fits));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(given, &same));
    handle = RAIIAtenTensorHandle(same);
    sizes.assign(handle.sizes(), handle.sizes() + rank);
    if (!fits && !(strided && handle.strides()[rank - 1] == 1)) {
      handle = empty(sizes);
      AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(handle, given, 0));
    }
    strides = handle.strides(), data = (float *)handle.data_ptr();
  }
  explicit Tensor(const AtenTensorHandle *given, bool strided = false) {
    if (given) *this = Tensor(*given, strided);
  }
  VlInput input() const {  // (directions, batch, steps, .) or (batch, steps, .)
    if (!data) return {};
    return sizes.size() == 4 ? VlInput{data, strides[0], strides[1], strides[2]}
                             : VlInput{data, 0, strides[0], strides[1]};
  }
  operator VlTensor() const {
    VlTensor tensor = {data, strides ? (int64_t)sizes.size() : -1, {}};
    for (size_t d = 0; d < sizes.size() && d < 4; d++) tensor.sizes[d] = sizes[d];
    return tensor;
  }
};

// The options of both operators.
struct Options {
  int32_t rule, threads = 0;
  std::vector<uint8_t> reverse;

  Options(const std::string &name, const int64_t *flags, int64_t directions)
      : rule(vl_rule(name.c_str())), reverse(flags, flags + directions) {
    if (rule < 0) fail("rule is " + name + ", expected longhorn, longhorn_exact, mamba or none");
    uint32_t count = 1;
    AOTI_TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&count));
    threads = count;
  }
};

// Calls a function of the kernels' library.
template <class Function, class... Args> void call(const char *name, Args... args) {
  if (const int error = kernel<Function>(name)(args...)) fail(kernel<decltype(vl_error)>("vl_error")(error));
}
}  // namespace
}  // namespace vilonghorn

[[maybe_unused]] static AOTITorchError aoti_torch_cpu_block(
    AtenTensorHandle x, AtenTensorHandle norm_weight, AtenTensorHandle in_proj, AtenTensorHandle conv_weight,
    AtenTensorHandle conv_bias, const AtenTensorHandle *x_proj, const AtenTensorHandle *dt_proj,
    const AtenTensorHandle *dt_bias, const AtenTensorHandle *A, const AtenTensorHandle *D, AtenTensorHandle out_proj,
    const AtenTensorHandle *mlp_norm_weight, const AtenTensorHandle *mlp_in_proj, const AtenTensorHandle *mlp_out_proj,
    const AtenTensorHandle *drop_scales, const char *rule, const int64_t *reverse, int64_t directions, double eps,
    double mlp_eps, int32_t bf16, const int64_t *conv_grid, int64_t grid_sizes, int32_t, AtenTensorHandle *out,
    AtenTensorHandle *xz, AtenTensorHandle *projected, AtenTensorHandle *saved_states, AtenTensorHandle *mid,
    AtenTensorHandle *gv) {
  using namespace vilonghorn;
  const Tensor tensors[VL_BLOCK_TENSORS] = {Tensor(x),           Tensor(norm_weight),  Tensor(in_proj),
                                            Tensor(conv_weight), Tensor(conv_bias),    Tensor(x_proj),
                                            Tensor(dt_proj),     Tensor(dt_bias),      Tensor(A),
                                            Tensor(D),           Tensor(out_proj),     Tensor(mlp_norm_weight),
                                            Tensor(mlp_in_proj), Tensor(mlp_out_proj), Tensor(drop_scales)};
  VlTensor inputs[VL_BLOCK_INPUTS];
  for (VlTensor &input : inputs) input = {nullptr, -1, {}};  // int8 weights are absent
  for (int i = 0; i < VL_BLOCK_TENSORS; i++) inputs[i] = tensors[i];
  const Options options(rule, reverse, directions);
  RAIIAtenTensorHandle y = empty(tensors[0].sizes);
  VlBlock b = {};
  b.rule = options.rule, b.threads = options.threads, b.eps = eps, b.mlp_eps = mlp_eps, b.bf16_parts = bf16 ? 1 : 0;
  if (grid_sizes) b.conv_grid = {conv_grid[0], conv_grid[1], conv_grid[2], nullptr};
  b.reverse = options.reverse.data(), b.out = y.data_ptr();
  call<decltype(vl_block_set)>("vl_block_set", &b, inputs, directions);
  call<decltype(vl_block_infer)>("vl_block_infer", &b, -1);
  *out = y.release();
  for (AtenTensorHandle *saved : {xz, projected, saved_states, mid, gv}) *saved = empty({0}).release();
  return AOTI_TORCH_SUCCESS;
}

[[maybe_unused]] static AOTITorchError aoti_torch_cpu_scan(AtenTensorHandle x, AtenTensorHandle dt, AtenTensorHandle k,
                                                           AtenTensorHandle q, const AtenTensorHandle *z,
                                                           const AtenTensorHandle *A, const AtenTensorHandle *D,
                                                           const AtenTensorHandle *dt_bias, const char *rule,
                                                           const int64_t *reverse, int64_t directions,
                                                           const char *reduce, const char **, int32_t,
                                                           AtenTensorHandle *out, AtenTensorHandle *saved_states) {
  using namespace vilonghorn;
  const Tensor values(x, true), steps(dt, true), keys(k, true), queries(q, true), gate(z, true), decay(A), skip(D),
      bias(dt_bias);
  const Options options(rule, reverse, directions);
  const bool mean = !strcmp(reduce, "mean");
  const VlTensor inputs[VL_SCAN_INPUTS] = {values, steps, keys, queries, gate, decay, skip, bias};
  VlScan s = {};
  s.mean = mean, s.rule = options.rule, s.threads = options.threads, s.reverse = options.reverse.data();
  call<decltype(vl_scan_set)>("vl_scan_set", &s, inputs, directions);
  s.x = values.input(), s.dt = steps.input(), s.k = keys.input(), s.q = queries.input(), s.z = gate.input();
  RAIIAtenTensorHandle none = empty({0}), y = empty({values.sizes.begin() + mean, values.sizes.end()});
  s.y = y.data_ptr();
  call<decltype(vl_scan_infer)>("vl_scan_infer", &s, -1);
  *out = y.release(), *saved_states = none.release();
  return AOTI_TORCH_SUCCESS;
}
