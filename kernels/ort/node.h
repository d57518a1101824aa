// What the operators for onnxruntime share: attributes and inputs of a node, errors, and the threads of a session.
#pragma once
#include <onnxruntime_c_api.h>

#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../cpu/threads.h"
#include "../include/vilonghorn.h"

namespace {

// Increase it with every change of an operator's inputs, attributes or meaning. Equals INTERFACE in
// vilonghorn/export/native.py, which writes it into every node.
constexpr int64_t kInterface = 5;
constexpr uint32_t kApiVersion = 17;  // of onnxruntime: the first with KernelContext_ParallelFor

struct Error {  // what methods throw
  OrtStatus *status;
};

// What all operators have: attributes, inputs and an output.
class Node {
 public:
  const OrtApi &api;

  Node(const char *name, const OrtApi &api, const OrtKernelInfo *info) : api(api), name_(name) {
    const int64_t interface = integer(info, "interface");
    if (interface != kInterface)
      fail("the model needs interface " + std::to_string(interface) + " of the operators, as of vilonghorn " +
           text(info, "version") + "; this library, of vilonghorn " VILONGHORN_VERSION ", has interface " +
           std::to_string(kInterface) + ". Load the library of that version, or export the model again");
  }

  int64_t integer(const OrtKernelInfo *info, const char *attribute) const {
    int64_t value = 0;
    check(api.KernelInfoGetAttribute_int64(info, attribute, &value));
    return value;
  }
  float number(const OrtKernelInfo *info, const char *attribute) const {
    float value = 0;
    check(api.KernelInfoGetAttribute_float(info, attribute, &value));
    return value;
  }

  bool is_constant_input(const OrtKernelInfo *info, size_t i) const {
    int is_constant = 0;
    const OrtValue *value = nullptr;
    check(api.KernelInfoGetConstantInput_tensor(info, i, &is_constant, &value));
    return is_constant != 0;
  }
  // Reads `count` inputs of the node, from number `first` on.
  void read(VlTensor *inputs, size_t count, const OrtKernelContext *context, size_t first = 0) const {
    for (size_t i = 0; i < count; i++) {
      const OrtValue *value = nullptr;
      check(api.KernelContext_GetInput(context, first + i, &value));
      inputs[i] = {nullptr, -1, {}};
      if (!value) continue;
      const std::vector<int64_t> sizes = shape(value);
      inputs[i].rank = (int64_t)sizes.size();
      for (size_t d = 0; d < sizes.size() && d < 4; d++) inputs[i].sizes[d] = sizes[d];
      check(api.GetTensorMutableData(const_cast<OrtValue *>(value), (void **)&inputs[i].data));
    }
  }
  // Takes what a function of the library returns.
  void require(int error) const {
    if (error) fail(vl_error(error));
  }

  float *output(OrtKernelContext *context, const std::vector<int64_t> &shape) const {
    OrtValue *value = nullptr;
    float *data = nullptr;
    check(api.KernelContext_GetOutput(context, 0, shape.data(), shape.size(), &value));
    check(api.GetTensorMutableData(value, (void **)&data));
    return data;
  }

  static void check(OrtStatus *status) {
    if (status) throw Error{status};
  }
  [[noreturn]] void fail(const std::string &problem) const {
    throw Error{api.CreateStatus(ORT_INVALID_ARGUMENT, (std::string("vilonghorn.") + name_ + ": " + problem).c_str())};
  }

  std::string text(const OrtKernelInfo *info, const char *attribute) const {
    size_t size = 0;  // with the null at the end
    check(api.KernelInfoGetAttribute_string(info, attribute, nullptr, &size));
    std::vector<char> value(size + 1);
    check(api.KernelInfoGetAttribute_string(info, attribute, value.data(), &size));
    return value.data();
  }

 private:
  std::vector<int64_t> shape(const OrtValue *value) const {
    OrtTensorTypeAndShapeInfo *info = nullptr;
    check(api.GetTensorTypeAndShape(value, &info));
    size_t rank = 0;
    OrtStatus *status = api.GetDimensionsCount(info, &rank);
    std::vector<int64_t> shape(rank);
    if (!status) status = api.GetDimensions(info, shape.data(), rank);
    api.ReleaseTensorTypeAndShapeInfo(info);
    check(status);
    return shape;
  }
  const char *name_;
};

// An operator with a scan or a block.
struct RuleNode : Node {
  int rule;
  std::vector<uint8_t> reverse;

  RuleNode(const char *name, const OrtApi &api, const OrtKernelInfo *info) : Node(name, api, info) {
    rule = vl_rule(text(info, "rule").c_str());
    if (rule < 0) fail("rule is '" + text(info, "rule") + "', expected longhorn, longhorn_exact, mamba or none");
    size_t count = 0;
    check(api.KernelInfoGetAttributeArray_int64(info, "reverse", nullptr, &count));
    std::vector<int64_t> flags(count);
    check(api.KernelInfoGetAttributeArray_int64(info, "reverse", flags.data(), &count));
    for (const int64_t flag : flags) {
      if (flag != 0 && flag != 1) fail("reverse has the flag " + std::to_string(flag) + ", expected 0 or 1");
      reverse.push_back((uint8_t)flag);
    }
  }
};

// The threads of a session. onnxruntime does not tell how many there are: this counts those that have run jobs. The
// first runs, and later a few, divide their work for twice as many: one job would be seen on one thread only.
class Workers {
 public:
  int count() {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t run = runs_++;
    return ((int)seen_.size() + 1) * (run < 8 || run % 32 == 0 ? 2 : 1);  // 1: the thread that calls
  }
  void see(std::thread::id thread) {
    std::lock_guard<std::mutex> lock(mutex_);
    seen_.insert(thread);
  }

 private:
  std::mutex mutex_;
  std::set<std::thread::id> seen_;
  int64_t runs_ = 0;
};

// Runs the kernels' jobs on the threads of the session, as long as it exists.
class SessionThreads : public vilonghorn::CallerThreads {
 public:
  SessionThreads(const OrtApi &api, const OrtKernelContext *context, Workers &workers)
      : api_(api), context_(context), workers_(workers), caller_(std::this_thread::get_id()) {
    vilonghorn::caller_threads = this;
  }
  ~SessionThreads() { vilonghorn::caller_threads = nullptr; }
  void parallel_for(void (*run)(void *, size_t), size_t jobs, void *data) override {
    run_ = run, data_ = data;
    Node::check(api_.KernelContext_ParallelFor(context_, run_one, jobs, 0, this));
  }

 private:
  static void run_one(void *self, size_t job) {
    SessionThreads &s = *(SessionThreads *)self;
    const std::thread::id thread = std::this_thread::get_id();
    if (thread != s.caller_) s.workers_.see(thread);
    s.run_(s.data_, job);
  }
  const OrtApi &api_;
  const OrtKernelContext *context_;
  Workers &workers_;
  const std::thread::id caller_;
  void (*run_)(void *, size_t) = nullptr;
  void *data_ = nullptr;
};

}  // namespace
