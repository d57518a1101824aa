// What the kernels take. It is checked here and before any of them runs, since a wrong size would end the process. The
// exported functions check the sizes of their structs, but those of VlLinear and VlStem. The operators in exported
// files also have their tensors checked, as vilonghorn/ops/validate.py does in Python.
#include <string>

#include "jobs.h"

namespace vilonghorn {
namespace {

thread_local std::string reason;

int fail(const std::string &problem) {
  reason = problem;
  return VL_INVALID;
}
std::string text(int64_t value) { return std::to_string(value); }
constexpr int64_t kAny = INT64_MAX;
bool fits(const char *name, int64_t size, int64_t least, int64_t most = kAny) {
  if (size >= least && size <= most) return true;
  const std::string range = most == kAny ? " or more" : most == least ? "" : " to " + text(most);
  fail(std::string(name) + " is " + text(size) + ", expected " + text(least) + range);
  return false;
}

// An input of an operator. dims: a letter for each dimension; equal letters are equal sizes. kind: '+' always given,
// 'S' with a recurrence, 'A' with the rule mamba, 'M' with an MLP, '8' with int8 weights, 'm' with both, '?' optional.
struct Input {
  const char *name, *dims;
  char kind;
};
constexpr Input kScan[VL_SCAN_INPUTS] = {{"x", "GBLD", '+'}, {"dt", "GBLD", '+'},   {"k", "GBLN", '+'},
                                         {"q", "GBLN", '+'}, {"z", "BLD", '?'},     {"A", "GDN", 'A'},
                                         {"D", "GD", '?'},   {"dt_bias", "GD", '?'}};
constexpr Input kBlock[VL_BLOCK_INPUTS] = {{"x", "BLE", '+'},
                                           {"norm_weight", "E", '+'},
                                           {"in_proj", "WE", '+'},
                                           {"conv_weight", "GDK", '+'},
                                           {"conv_bias", "GD", '+'},
                                           {"x_proj", "GPD", 'S'},
                                           {"dt_proj", "GHR", 'S'},
                                           {"dt_bias", "GH", 'S'},
                                           {"A", "GDN", 'A'},
                                           {"D", "GD", 'S'},
                                           {"out_proj", "ED", '+'},
                                           {"mlp_norm_weight", "E", 'M'},
                                           {"mlp_in_proj", "VE", 'M'},
                                           {"mlp_out_proj", "EM", 'M'},
                                           {"drop_scales", "FB", '?'},
                                           {"in_proj_scale", "W", '8'},
                                           {"out_proj_scale", "E", '8'},
                                           {"mlp_in_proj_scale", "V", 'm'},
                                           {"mlp_out_proj_scale", "E", 'm'}};
constexpr Input kLinear[VL_LINEAR_INPUTS] = {
    {"x", "BYXC", '+'}, {"norm_weight", "K", '?'}, {"weight", "OK", '+'}, {"bias", "O", '?'}, {"scale", "O", '?'}};
constexpr Input kStem[VL_STEM_INPUTS] = {{"images", "BCYX", '+'},  {"weight1", "HCTT", '+'}, {"bias1", "H", '+'},
                                         {"weight2", "DHTT", '+'}, {"bias2", "D", '+'},      {"norm_weight", "D", '+'},
                                         {"scale", "D", '?'}};
constexpr int kMlp = 13, kInt8 = 15;  // the inputs of kBlock that tell whether there are an MLP and int8 weights

class Shapes {
 public:
  int64_t &operator[](char letter) { return sizes_[(int)letter]; }  // 0: not known

  // Weights come last and are read first: x must fit them.
  int check(const Input *inputs, int64_t count, const VlTensor *given, int rule, int64_t flags) {
    if (rule < 0 || rule > VL_NONE) return VL_UNKNOWN_RULE;
    for (int64_t i = count; i-- > 0;) {
      const char kind = inputs[i].kind;
      const bool is_given = given[i].rank >= 0;
      bool is_wanted = kind == '+' || (kind == '?' && is_given) || (kind == 'S' && rule != VL_NONE);
      if (kind == 'A') is_wanted = rule == VL_MAMBA;
      if (kind == 'M') is_wanted = given[kMlp].rank >= 0;
      if (kind == '8') is_wanted = given[kInt8].rank >= 0;
      if (kind == 'm') is_wanted = given[kInt8].rank >= 0 && given[kMlp].rank >= 0;
      if (is_given != is_wanted)
        return fail(std::string("input ") + inputs[i].name + (is_given ? " is given" : " is missing") + ", with rule " +
                    VL_RULES[rule]);
      if (is_given && !match(inputs[i], given[i])) return VL_INVALID;
    }
    return fits("the number of flags in reverse", flags, (*this)['G'], (*this)['G']) ? 0 : VL_INVALID;
  }

 private:
  bool match(const Input &input, const VlTensor &given) {
    const std::string dims = input.dims;
    std::string shape, expected;
    bool matches = given.rank == (int64_t)dims.size();
    for (int64_t i = 0; i < given.rank; i++) shape += (i ? "x" : "") + (i < 4 ? text(given.sizes[i]) : "...");
    for (size_t i = 0; i < dims.size(); i++) {
      int64_t &size = (*this)[dims[i]];
      expected += (i ? "x" : "") + (size ? text(size) : std::string(1, dims[i]));
      matches = matches && given.sizes[i] > 0 && (!size || size == given.sizes[i]);
      if (matches) size = given.sizes[i];
    }
    return matches || !fail(std::string("input ") + input.name + " has shape " + shape + ", expected " + expected);
  }
  int64_t sizes_[128] = {};
};

}  // namespace

int check(const VlScan &s, bool is_mixer) {
  const bool none = s.rule == VL_NONE;
  if (s.rule < 0 || s.rule > VL_NONE || (none && !is_mixer)) return VL_UNKNOWN_RULE;
  if (s.channels > 0 && !s.A == (s.rule == VL_MAMBA))
    return fail(std::string("A is ") + (s.A ? "given" : "missing") + ", with rule " + VL_RULES[s.rule]);
  const bool all = fits("directions", s.directions, 1) && fits("batch", s.batch, 0) && fits("length", s.length, 0) &&
                   fits("channels", s.channels, 0) && fits("states", s.states, !none, none ? 0 : VL_MAX_STATES) &&
                   fits("chunk", s.chunk, 1) && fits("channel_splits", s.channel_splits, 1) &&
                   fits("dtype", s.dtype, VL_FLOAT32, VL_FLOAT64);
  return all ? 0 : VL_INVALID;
}
int check(const VlMambaInner &m) {
  const VlScan &s = m.scan;
  const VlConvGrid &g = m.conv_grid;
  if (const int error = check(s, true)) return error;
  if (!fits("d_conv", m.d_conv, 1, VL_MAX_CONV)) return VL_INVALID;
  if (s.rule != VL_NONE && (m.num_heads < 1 || s.channels % m.num_heads))
    return fail("num_heads is " + text(m.num_heads) + ", expected a divisor of the " + text(s.channels) + " channels");
  if (!g.rows) return 0;
  if (g.height < 1 || g.height % 2 == 0 || m.d_conv % g.height || m.d_conv / g.height % 2 == 0)
    return fail("the filter has " + text(g.height) + " rows and " + text(m.d_conv) + " taps, expected odd sides");
  const bool all = fits("rows", g.rows, 1, s.length) && fits("columns", g.columns, 1, s.length) &&
                   fits("the number of tokens beside the grid", s.length - g.rows * g.columns, 0, 1);
  return all ? 0 : VL_INVALID;
}
int check(const VlBlock &b) {
  if (const int error = check(mamba_inner_of(b, nullptr, 0, nullptr))) return error;
  return fits("dim", b.dim, 1) && fits("hidden", b.hidden, 0) ? 0 : VL_INVALID;
}
int check(const VlConv &c) { return fits("d_conv", c.d_conv, 1, VL_MAX_CONV) ? 0 : VL_INVALID; }
}  // namespace vilonghorn

using namespace vilonghorn;

VL_EXPORT const char *vl_error(int error) {
  if (error == VL_INVALID) return reason.c_str();
  return error == VL_UNKNOWN_RULE ? "the kernels do not implement this rule"
                                  : "out of memory, or no instruction set that runs here";
}
VL_EXPORT int vl_scan_set(VlScan *s, const VlTensor *inputs, int64_t flags) {
  Shapes n;
  if (const int error = n.check(kScan, VL_SCAN_INPUTS, inputs, s->rule, flags)) return error;
  const int64_t L = n['L'], D = n['D'], N = n['N'], B = n['B'];
  s->directions = n['G'], s->batch = B, s->length = L, s->channels = D, s->states = N;
  VlInput *const views[] = {&s->x, &s->dt, &s->k, &s->q, &s->z};
  for (int i = 0; i < 5; i++) {
    const int64_t width = i == 2 || i == 3 ? N : D;
    *views[i] = {inputs[i].data, i < 4 ? B * L * width : 0, L * width, width};
  }
  s->A = inputs[5].data, s->D = inputs[6].data, s->dt_bias = inputs[7].data;
  return 0;
}
VL_EXPORT int vl_block_set(VlBlock *b, const VlTensor *inputs, int64_t flags) {
  Shapes n;
  if (const int error = n.check(kBlock, VL_BLOCK_INPUTS, inputs, b->rule, flags)) return error;
  b->batch = n['B'], b->length = n['L'], b->dim = n['E'], b->directions = n['G'], b->channels = n['D'];
  b->d_conv = n['K'], b->dt_rank = n['R'], b->num_heads = n['H'], b->states = (n['P'] - n['R']) / 2;
  b->hidden = n['M'];
  const void **const fields = (const void **)((char *)b + offsetof(VlBlock, x));
  for (int i = 0; i < VL_BLOCK_TENSORS; i++) fields[i] = inputs[i].data;
  const void **const scales = (const void **)((char *)b + offsetof(VlBlock, in_proj_scale));
  for (int i = kInt8; i < VL_BLOCK_INPUTS; i++) scales[i - kInt8] = inputs[i].data;
  const auto equal = [](const char *name, int64_t given, int64_t wanted) { return fits(name, given, wanted, wanted); };
  const bool all = equal("the number of rows of in_proj", n['W'], 2 * b->channels) &&
                   equal("the number of rows of x_proj", n['P'], b->dt_rank + 2 * b->states) &&
                   (!b->A || equal("the number of states of A", n['N'], b->states)) &&
                   equal("the number of rows of mlp_in_proj", n['V'], 2 * b->hidden) &&
                   (!b->drop_scales || equal("the number of rows of drop_scales", n['F'], 1 + (b->hidden > 0)));
  return all ? 0 : VL_INVALID;
}
VL_EXPORT int vl_linear_set(VlLinear *l, const VlTensor *inputs) {
  Shapes n;
  if (const int error = n.check(kLinear, VL_LINEAR_INPUTS, inputs, VL_NONE, 0)) return error;
  l->batch = n['B'], l->channels = n['C'], l->out_channels = n['O'];
  l->x = inputs[0].data, l->norm_weight = inputs[1].data, l->weight = inputs[2].data, l->bias = inputs[3].data;
  l->scale = inputs[4].data;
  if (!fits("merge", l->merge, 1, 16)) return VL_INVALID;
  if (n['Y'] % l->merge || n['X'] % l->merge)
    return fail("the map has " + text(n['Y']) + "x" + text(n['X']) + " tokens, expected multiples of " +
                text(l->merge));
  l->rows = n['Y'] / l->merge, l->columns = n['X'] / l->merge;
  const int64_t depth = l->merge * l->merge * l->channels;
  return fits("the number of columns of weight", n['K'], depth, depth) ? 0 : VL_INVALID;
}
VL_EXPORT int vl_stem_set(VlStem *s, const VlTensor *inputs) {
  Shapes n;
  if (const int error = n.check(kStem, VL_STEM_INPUTS, inputs, VL_NONE, 0)) return error;
  s->batch = n['B'], s->channels = n['C'], s->rows = n['Y'], s->columns = n['X'], s->hidden = n['H'], s->dim = n['D'];
  const void **const fields = (const void **)((char *)s + offsetof(VlStem, images));
  for (int i = 0; i < VL_STEM_INPUTS; i++) fields[i] = inputs[i].data;
  const bool all = fits("the side of the filters", n['T'], 3, 3) && fits("stride1", s->stride1, 1, 2) &&
                   fits("stride2", s->stride2, 1, 2);
  return all ? 0 : VL_INVALID;
}
