// Operators for onnxruntime over the CPU kernels: Block, BlockInt8, Scan and Norm of the domain "vilonghorn", in
// float32. RegisterCustomOpsLibrary_V2, in Python SessionOptions.register_custom_ops_library, finds them in this
// library.
#include "../cpu/arena.h"
#include "node.h"

namespace {

// `vilonghorn.ops.block` without drop_scales; then the conv_grid, and the scales of int8 weights. INT8: in_proj,
// out_proj, mlp_in_proj and mlp_out_proj are int8, with a scale for each row.
template <bool INT8> struct Block : RuleNode {
  static constexpr const char *kName = INT8 ? "BlockInt8" : "Block";
  static constexpr size_t kInProj = 2, kOutProj = 10, kMlpInProj = 12, kMlpOutProj = 13, kGrid = 14, kScales = 15;
  static constexpr size_t kNumInputs = INT8 ? kScales + 4 : kScales;
  static ONNXTensorElementDataType type(size_t i) {
    if (i == kGrid) return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    const bool is_int8 = INT8 && (i == kInProj || i == kOutProj || i == kMlpInProj || i == kMlpOutProj);
    return is_int8 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  static bool is_optional(size_t i) {  // x_proj to D, the MLP, the grid, the scales of the MLP
    return i >= 5 && i != kOutProj && i != kScales && i != kScales + 1;
  }
  const float eps, mlp_eps;
  static constexpr size_t kWeights[] = {kInProj, kOutProj, kMlpInProj, kMlpOutProj};
  bool is_constant[4];  // whether each of these is a constant of the file
  mutable std::once_flag once;
  mutable Scratch panels;

  Block(const OrtApi &api, const OrtKernelInfo *info)
      : RuleNode(kName, api, info), eps(number(info, "eps")), mlp_eps(number(info, "mlp_eps")) {
    for (int i = 0; i < 4; i++) is_constant[i] = is_constant_input(info, kWeights[i]);
  }
  // The weights in the order in which products read them. The first run writes them.
  const void *packed(const VlBlock &b) const {
    std::call_once(once, [&] {
      void *to = panels.reserve(vl_block_packed_bytes(&b, -1));
      require(to ? vl_block_pack(&b, to, -1) : 1);
    });
    return panels.data;
  }
  void run(OrtKernelContext *context, int threads) const {
    VlTensor inputs[VL_BLOCK_INPUTS], grid;
    for (VlTensor &input : inputs) input = {nullptr, -1, {}};
    read(inputs, kGrid, context);
    read(&grid, 1, context, kGrid);
    if (INT8) read(inputs + VL_BLOCK_TENSORS, 4, context, kScales);
    VlBlock b = {};
    b.rule = rule, b.threads = threads, b.eps = eps, b.mlp_eps = mlp_eps, b.reverse = reverse.data();
    if (grid.rank >= 0) {
      if (grid.rank != 1 || grid.sizes[0] != 3) fail("input grid is not rows, columns and the height of the filter");
      const int64_t *const sizes = (const int64_t *)grid.data;
      if (sizes[0] < 1) fail("input grid has " + std::to_string(sizes[0]) + " rows, expected 1 or more");
      b.conv_grid = {sizes[0], sizes[1], sizes[2], nullptr};
    }
    require(vl_block_set(&b, inputs, (int64_t)reverse.size()));
    b.out = output(context, {b.batch, b.length, b.dim});
    bool packs = true;
    for (int i = 0; i < 4; i++) packs = packs && (is_constant[i] || inputs[kWeights[i]].rank < 0);
    if (packs) b.packed = packed(b);
    require(vl_block_infer(&b, -1));
  }
};

// `vilonghorn.ops.scan`; attribute `mean` is its reduce="mean".
struct Scan : RuleNode {
  static constexpr const char *kName = "Scan";
  static constexpr size_t kNumInputs = VL_SCAN_INPUTS;
  static ONNXTensorElementDataType type(size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static bool is_optional(size_t i) { return i >= 4; }  // z to dt_bias
  int64_t mean;

  Scan(const OrtApi &api, const OrtKernelInfo *info) : RuleNode(kName, api, info), mean(integer(info, "mean")) {
    if (mean != 0 && mean != 1) fail("mean is " + std::to_string(mean) + ", expected 0 or 1");
  }
  void run(OrtKernelContext *context, int threads) const {
    VlTensor inputs[VL_SCAN_INPUTS];
    read(inputs, kNumInputs, context);
    VlScan s = {};
    s.rule = rule, s.threads = threads, s.mean = (int32_t)mean, s.reverse = reverse.data();
    require(vl_scan_set(&s, inputs, (int64_t)reverse.size()));
    std::vector<int64_t> sizes = {s.directions, s.batch, s.length, s.channels};
    s.y = output(context, {sizes.begin() + mean, sizes.end()});
    require(vl_scan_infer(&s, -1));
  }
};

// `vilonghorn.ops.rms_norm` of tokens or of a map.
struct Norm : Node {
  static constexpr const char *kName = "Norm";
  static constexpr size_t kNumInputs = 2;  // x, weight
  static ONNXTensorElementDataType type(size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  static bool is_optional(size_t) { return false; }
  const float eps;

  Norm(const OrtApi &api, const OrtKernelInfo *info) : Node(kName, api, info), eps(number(info, "eps")) {}
  void run(OrtKernelContext *context, int threads) const {
    static thread_local Scratch scales;
    VlTensor inputs[kNumInputs];
    read(inputs, kNumInputs, context);
    const VlTensor &x = inputs[0], &weight = inputs[1];
    if (x.rank < 1 || x.rank > 4) fail("input x has " + std::to_string(x.rank) + " dimensions, expected 1 to 4");
    const std::vector<int64_t> sizes(x.sizes, x.sizes + x.rank);
    const int64_t channels = sizes.back();
    if (weight.rank != 1 || weight.sizes[0] != channels || channels < 1)
      fail("input weight does not have the " + std::to_string(channels) + " channels of x");
    VlNorm n = {};
    n.batch = 1, n.channels = channels, n.eps = eps, n.threads = threads, n.x = x.data, n.weight = weight.data;
    for (size_t i = 0; i + 1 < sizes.size(); i++) n.batch *= sizes[i];
    n.y = output(context, sizes), n.scale = scales.reserve(sizeof(float) * n.batch + 1);  // + 1: not null without rows
    require(n.scale ? vl_norm_forward(&n, -1) : 1);
  }
};

template <class Kernel> struct State {
  Kernel kernel;
  Workers workers;
};

template <class Run> OrtStatus *guard(const OrtApi &api, Run run) {
  try {
    run();
    return nullptr;
  } catch (const Error &error) { return error.status; } catch (const std::exception &error) {
    return api.CreateStatus(ORT_FAIL, (std::string("vilonghorn: ") + error.what()).c_str());
  }
}

template <class Kernel> struct Operator : OrtCustomOp {
  Operator() : OrtCustomOp() {
    version = kApiVersion;
    GetName = [](const OrtCustomOp *) { return Kernel::kName; };
    GetExecutionProviderType = [](const OrtCustomOp *) { return "CPUExecutionProvider"; };
    GetInputTypeCount = [](const OrtCustomOp *) { return Kernel::kNumInputs; };
    GetInputType = [](const OrtCustomOp *, size_t i) { return Kernel::type(i); };
    GetInputCharacteristic = [](const OrtCustomOp *, size_t i) {
      return Kernel::is_optional(i) ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
    };
    GetInputMemoryType = [](const OrtCustomOp *, size_t) { return OrtMemTypeDefault; };
    GetOutputTypeCount = [](const OrtCustomOp *) -> size_t { return 1; };
    GetOutputType = [](const OrtCustomOp *, size_t) { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; };
    GetOutputCharacteristic = [](const OrtCustomOp *, size_t) { return INPUT_OUTPUT_REQUIRED; };
    GetStartVersion = GetEndVersion = [](const OrtCustomOp *) { return 1; };
    CreateKernelV2 = [](const OrtCustomOp *, const OrtApi *api, const OrtKernelInfo *info, void **made) {
      return guard(*api, [&] { *made = new State<Kernel>{Kernel(*api, info), {}}; });
    };
    KernelDestroy = [](void *state) { delete (State<Kernel> *)state; };
    KernelComputeV2 = [](void *state, OrtKernelContext *context) {
      State<Kernel> &s = *(State<Kernel> *)state;
      return guard(s.kernel.api, [&] {
        const SessionThreads threads(s.kernel.api, context, s.workers);
        s.kernel.run(context, s.workers.count());
      });
    };
  }
};

}  // namespace

extern "C" VL_EXPORT OrtStatus *ORT_API_CALL RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  static const Operator<Block<false>> block;
  static const Operator<Block<true>> block_int8;
  static const Operator<Scan> scan;
  static const Operator<Norm> norm;
  const OrtApi *api = base->GetApi(kApiVersion);
  if (!api) {
    const std::string problem =
        std::string("vilonghorn's operators need onnxruntime 1.17 or later; this is ") + base->GetVersionString();
    return base->GetApi(1)->CreateStatus(ORT_FAIL, problem.c_str());
  }
  OrtCustomOpDomain *domain = nullptr;  // never released: sessions refer to it
  OrtStatus *status = api->CreateCustomOpDomain("vilonghorn", &domain);
  for (const OrtCustomOp *op : std::initializer_list<const OrtCustomOp *>{&block, &block_int8, &scan, &norm})
    if (!status) status = api->CustomOpDomain_Add(domain, op);
  return status ? status : api->AddCustomOpDomain(options, domain);
}
