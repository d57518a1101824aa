// Operators for onnxruntime over the CPU kernels: Block, BlockInt8 and Scan of the domain "vilonghorn", in float32.
// RegisterCustomOpsLibrary_V2, in Python SessionOptions.register_custom_ops_library, finds them in this library.
#include "node.h"

namespace {

// `vilonghorn.ops.block` without its MLP. INT8: in_proj and out_proj are int8, with a scale for each row.
template <bool INT8> struct Block : Node {
  static constexpr const char *kName = INT8 ? "BlockInt8" : "Block";
  static constexpr Input kInputs[] = {
      {"x", "BLE"},           {"norm_weight", "E"},    {"in_proj", "WE", false, INT8},  {"conv_weight", "GDK"},
      {"conv_bias", "GD"},    {"x_proj", "GPD", true}, {"dt_proj", "GHR", true},        {"dt_bias", "GH", true},
      {"A", "GDN", true},     {"D", "GD", true},       {"out_proj", "ED", false, INT8}, {"in_proj_scale", "W"},
      {"out_proj_scale", "E"}};
  static constexpr size_t kNumInputs = INT8 ? 13 : 11;
  float eps = 0;

  Block(const OrtApi &api, const OrtKernelInfo *info) : Node(kName, api, info) {
    check(api.KernelInfoGetAttribute_float(info, "eps", &eps));
  }
  int run(OrtKernelContext *context, int threads) const {
    Sizes n;
    const std::vector<const void *> in = read(kInputs, kNumInputs, context, n);
    const int64_t states = (n['P'] - n['R']) / 2;
    const bool has_all = in[5] && in[6] && in[7] && in[9] && !in[8] == (rule != VL_MAMBA);
    const bool fits =
        has_all && n['P'] == n['R'] + 2 * states && states >= 1 && n['D'] % n['H'] == 0 && (!in[8] || n['N'] == states);
    if (n['W'] != 2 * n['D'] || !(rule == VL_NONE ? !in[5] : fits))
      fail("in_proj has " + std::to_string(n['W']) + " rows, x_proj " + std::to_string(n['P']) + " and dt_proj " +
           std::to_string(n['H']) + ", which do not fit the rule, D = " + std::to_string(n['D']) +
           ", R = " + std::to_string(n['R']) + " and A");
    VlBlock b = {};
    b.batch = n['B'], b.length = n['L'], b.dim = n['E'], b.directions = n['G'], b.channels = n['D'], b.states = states;
    b.d_conv = n['K'], b.dt_rank = n['R'], b.num_heads = n['H'], b.rule = rule, b.threads = threads, b.eps = eps;
    b.reverse = reverse.data();
    memcpy((char *)&b + offsetof(VlBlock, x), in.data(), 11 * sizeof in[0]);  // to out_proj
    if (INT8) b.in_proj_scale = in[11], b.out_proj_scale = in[12];
    b.out = output(context, {n['B'], n['L'], n['E']});
    return vl_block_infer(&b, -1);
  }
};

// `vilonghorn.ops.scan`; attribute `mean` is its reduce="mean".
struct Scan : Node {
  static constexpr const char *kName = "Scan";
  static constexpr Input kInputs[] = {{"x", "GBLD"},     {"dt", "GBLD"},         {"k", "GBLN"},
                                      {"q", "GBLN"},     {"z", "BLD", true},     {"A", "GDN", true},
                                      {"D", "GD", true}, {"dt_bias", "GD", true}};
  static constexpr size_t kNumInputs = std::size(kInputs);
  bool mean;

  Scan(const OrtApi &api, const OrtKernelInfo *info) : Node(kName, api, info), mean(integer(info, "mean")) {}
  int run(OrtKernelContext *context, int threads) const {
    Sizes n;
    const std::vector<const void *> in = read(kInputs, kNumInputs, context, n);
    const int64_t G = n['G'], B = n['B'], L = n['L'], D = n['D'], N = n['N'];
    VlScan s = {};
    s.directions = G, s.batch = B, s.length = L, s.channels = D, s.states = N, s.mean = mean;
    s.rule = rule, s.threads = threads, s.reverse = reverse.data();
    s.x = {in[0], B * L * D, L * D, D}, s.dt = {in[1], B * L * D, L * D, D}, s.z = {in[4], 0, L * D, D};
    s.k = {in[2], B * L * N, L * N, N}, s.q = {in[3], B * L * N, L * N, N};
    s.A = in[5], s.D = in[6], s.dt_bias = in[7];
    s.y = mean ? output(context, {B, L, D}) : output(context, {G, B, L, D});
    return vl_scan_infer(&s, -1);
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
  } catch (const Error &error) { return error.status; } catch (const std::bad_alloc &) {
    return api.CreateStatus(ORT_FAIL, "vilonghorn: out of memory");
  }
}

template <class Kernel> struct Operator : OrtCustomOp {
  Operator() : OrtCustomOp() {
    version = kApiVersion;
    GetName = [](const OrtCustomOp *) { return Kernel::kName; };
    GetExecutionProviderType = [](const OrtCustomOp *) { return "CPUExecutionProvider"; };
    GetInputTypeCount = [](const OrtCustomOp *) { return Kernel::kNumInputs; };
    GetInputType = [](const OrtCustomOp *, size_t i) {
      return Kernel::kInputs[i].int8 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    };
    GetInputCharacteristic = [](const OrtCustomOp *, size_t i) {
      return Kernel::kInputs[i].optional ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
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
        if (s.kernel.run(context, s.workers.count()))
          s.kernel.fail("out of memory, or no instruction set that runs here");
      });
    };
  }
};

}  // namespace

extern "C" VL_EXPORT OrtStatus *ORT_API_CALL RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  static const Operator<Block<false>> block;
  static const Operator<Block<true>> block_int8;
  static const Operator<Scan> scan;
  const OrtApi *api = base->GetApi(kApiVersion);
  if (!api) {
    const std::string problem =
        std::string("vilonghorn's operators need onnxruntime 1.17 or later; this is ") + base->GetVersionString();
    return base->GetApi(1)->CreateStatus(ORT_FAIL, problem.c_str());
  }
  OrtCustomOpDomain *domain = nullptr;  // never released: sessions refer to it
  OrtStatus *status = api->CreateCustomOpDomain("vilonghorn", &domain);
  for (const OrtCustomOp *op :
       {(const OrtCustomOp *)&block, (const OrtCustomOp *)&block_int8, (const OrtCustomOp *)&scan})
    if (!status) status = api->CustomOpDomain_Add(domain, op);
  return status ? status : api->AddCustomOpDomain(options, domain);
}
