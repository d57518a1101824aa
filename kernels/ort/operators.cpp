// Operators for onnxruntime over the CPU kernels: Block, Linear, Stem, each also with int8 weights as BlockInt8 and so
// on, Scan and Norm of the domain "vilonghorn", in float32. RegisterCustomOpsLibrary_V2, in Python
// SessionOptions.register_custom_ops_library, finds them in this library.
#include <algorithm>

#include "../cpu/arena.h"
#include "node.h"

namespace {

ONNXTensorElementDataType float_or_int8(bool is_int8) {
  return is_int8 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
}

// Weights in the order in which products read them, where all of them are constants of the file. The first run writes
// them.
class Packed {
 public:
  Packed(const Node &node, const OrtKernelInfo *info, std::initializer_list<size_t> weights) : weights_(weights) {
    for (const size_t i : weights) constant_.push_back(node.is_constant_input(info, i));
  }
  // Null where they are not constants. `size` and `pack` are functions of the library.
  template <class Params>
  const void *get(const Node &node, const Params &params, const VlTensor *inputs, int64_t (*size)(const Params *, int),
                  int (*pack)(const Params *, void *, int)) const {
    for (size_t i = 0; i < weights_.size(); i++)
      if (!constant_[i] && inputs[weights_[i]].rank >= 0) return nullptr;
    std::call_once(once_, [&] {
      void *to = panels_.reserve(size(&params, -1));
      node.require(to ? pack(&params, to, -1) : 1);
    });
    return panels_.data;
  }

 private:
  const std::vector<size_t> weights_;
  std::vector<bool> constant_;
  mutable std::once_flag once_;
  mutable Scratch panels_;
};

// `vilonghorn.ops.block` without drop_scales; then the conv_grid, and the scales of int8 weights. INT8: in_proj,
// out_proj, mlp_in_proj and mlp_out_proj are int8, with a scale for each row. x may be a map, (B, rows, columns, dim);
// the rows and columns of the grid are then those of the map.
template <bool INT8> struct Block : RuleNode {
  static constexpr const char *kName = INT8 ? "BlockInt8" : "Block";
  static constexpr size_t kInProj = 2, kOutProj = 10, kMlpInProj = 12, kMlpOutProj = 13, kGrid = 14, kScales = 15;
  static constexpr size_t kNumInputs = INT8 ? kScales + 4 : kScales;
  static ONNXTensorElementDataType type(size_t i) {
    if (i == kGrid) return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    return float_or_int8(INT8 && (i == kInProj || i == kOutProj || i == kMlpInProj || i == kMlpOutProj));
  }
  static bool is_optional(size_t i) {  // x_proj to D, the MLP, the grid, the scales of the MLP
    return i >= 5 && i != kOutProj && i != kScales && i != kScales + 1;
  }
  const float eps, mlp_eps;
  const Packed packed;

  Block(const OrtApi &api, const OrtKernelInfo *info)
      : RuleNode(kName, api, info), eps(number(info, "eps")), mlp_eps(number(info, "mlp_eps")),
        packed(*this, info, {kInProj, kOutProj, kMlpInProj, kMlpOutProj}) {}
  void run(OrtKernelContext *context, int threads) const {
    VlTensor inputs[VL_BLOCK_INPUTS], grid;
    for (VlTensor &input : inputs) input = {nullptr, -1, {}};
    read(inputs, kGrid, context);
    read(&grid, 1, context, kGrid);
    if (INT8) read(inputs + VL_BLOCK_TENSORS, 4, context, kScales);
    const int64_t *const of_x = inputs[0].sizes, rank = inputs[0].rank;
    std::vector<int64_t> sizes(of_x, of_x + std::min<int64_t>(std::max<int64_t>(rank, 0), 4));
    const bool is_map = inputs[0].rank == 4;
    if (is_map) inputs[0] = {inputs[0].data, 3, {sizes[0], sizes[1] * sizes[2], sizes[3]}};
    VlBlock b = {};
    b.rule = rule, b.threads = threads, b.eps = eps, b.mlp_eps = mlp_eps, b.reverse = reverse.data();
    if (grid.rank >= 0) {
      if (grid.rank != 1 || grid.sizes[0] != 3) fail("input grid is not rows, columns and the height of the filter");
      const int64_t *const given = (const int64_t *)grid.data, rows = is_map ? sizes[1] : given[0];
      if (rows < 1) fail("input grid has " + std::to_string(rows) + " rows, expected 1 or more");
      b.conv_grid = {rows, is_map ? sizes[2] : given[1], given[2], nullptr};
    }
    require(vl_block_set(&b, inputs, (int64_t)reverse.size()));
    b.out = output(context, sizes);
    b.packed = packed.get(*this, b, inputs, vl_block_packed_bytes, vl_block_pack);
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

// A linear layer of tokens, `merge` x `merge` of a map side by side, perhaps after a norm: x, (B, rows, columns,
// channels) or without merging (B, channels), norm_weight, weight, bias; INT8: the scale of each row of weight.
template <bool INT8> struct Linear : Node {
  static constexpr const char *kName = INT8 ? "LinearInt8" : "Linear";
  static constexpr size_t kWeight = 2, kScale = 4, kNumInputs = INT8 ? kScale + 1 : kScale;
  static ONNXTensorElementDataType type(size_t i) { return float_or_int8(INT8 && i == kWeight); }
  static bool is_optional(size_t i) { return i == 1 || i == 3; }
  const float eps;
  const int64_t merge;
  const Packed packed;

  Linear(const OrtApi &api, const OrtKernelInfo *info)
      : Node(kName, api, info), eps(number(info, "eps")), merge(integer(info, "merge")),
        packed(*this, info, {kWeight}) {}
  void run(OrtKernelContext *context, int threads) const {
    VlTensor inputs[VL_LINEAR_INPUTS];
    inputs[kScale] = {nullptr, -1, {}};
    read(inputs, kNumInputs, context);
    VlTensor &x = inputs[0];
    const bool is_map = x.rank != 2;
    if (!is_map) x = {x.data, 4, {1, 1, x.sizes[0], x.sizes[1]}};
    VlLinear l = {};
    l.merge = merge, l.eps = eps, l.threads = threads;
    require(vl_linear_set(&l, inputs));
    std::vector<int64_t> sizes = {l.batch, l.rows, l.columns, l.out_channels};
    if (!is_map) sizes.erase(sizes.begin(), sizes.begin() + 2);
    l.out = output(context, sizes);
    l.packed = packed.get(*this, l, inputs, vl_linear_packed_bytes, vl_linear_pack);
    require(vl_linear_forward(&l, -1));
  }
};

// Two convolutions of 3x3, with a SiLU between them, and a norm: images (B, channels, height, width), weight and bias
// of both, norm_weight, INT8: the scale of each channel of the second one. To a map (B, rows, columns, dim).
template <bool INT8> struct Stem : Node {
  static constexpr const char *kName = INT8 ? "StemInt8" : "Stem";
  static constexpr size_t kWeight1 = 1, kWeight2 = 3, kScale = 6, kNumInputs = INT8 ? kScale + 1 : kScale;
  static ONNXTensorElementDataType type(size_t i) { return float_or_int8(INT8 && i == kWeight2); }
  static bool is_optional(size_t) { return false; }
  const float eps;
  const int64_t stride1, stride2, step;
  const Packed packed;

  Stem(const OrtApi &api, const OrtKernelInfo *info)
      : Node(kName, api, info), eps(number(info, "eps")), stride1(integer(info, "stride1")),
        stride2(integer(info, "stride2")), step(integer(info, "step")), packed(*this, info, {kWeight1, kWeight2}) {}
  void run(OrtKernelContext *context, int threads) const {
    VlTensor inputs[VL_STEM_INPUTS];
    inputs[kScale] = {nullptr, -1, {}};
    read(inputs, kNumInputs, context);
    VlStem s = {};
    s.stride1 = stride1, s.stride2 = stride2, s.eps = eps, s.threads = threads;
    require(vl_stem_set(&s, inputs));
    if (step < 1 || s.rows % step || s.columns % step)
      fail("images have " + std::to_string(s.rows) + "x" + std::to_string(s.columns) +
           " pixels, expected multiples of " + std::to_string(step));
    const auto side = [&](int64_t side) { return (side - 1) / stride1 / stride2 + 1; };
    s.out = output(context, {s.batch, side(s.rows), side(s.columns), s.dim});
    s.packed = packed.get(*this, s, inputs, vl_stem_packed_bytes, vl_stem_pack);
    require(vl_stem_forward(&s, -1));
  }
};

template <class Kernel> struct State {
  Kernel kernel;
  Workers workers;
  State(const OrtApi &api, const OrtKernelInfo *info) : kernel(api, info) {}
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
      return guard(*api, [&] { *made = new State<Kernel>(*api, info); });
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
  static const Operator<Linear<false>> linear;
  static const Operator<Linear<true>> linear_int8;
  static const Operator<Stem<false>> stem;
  static const Operator<Stem<true>> stem_int8;
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
  for (const OrtCustomOp *op : std::initializer_list<const OrtCustomOp *>{&block, &block_int8, &linear, &linear_int8,
                                                                          &stem, &stem_int8, &scan, &norm})
    if (!status) status = api->CustomOpDomain_Add(domain, op);
  return status ? status : api->AddCustomOpDomain(options, domain);
}
