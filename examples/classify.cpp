// Runs a file of `vilonghorn export --to ort` without Python: reads one image of float32 numbers (channels, height,
// width), normalised as in training, from standard input, and prints its scores.
//
//   g++ -std=c++17 classify.cpp -I ONNXRUNTIME/include -L ONNXRUNTIME/lib -l onnxruntime -o classify
//   ./classify vilonghorn_tiny.ort.onnx ./libvilonghorn_cpu.so 224 224 < image.f32
#include <onnxruntime_c_api.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

static const OrtApi *ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);

static void check(OrtStatus *status) {
  if (!status) return;
  fprintf(stderr, "%s\n", ort->GetErrorMessage(status));
  exit(1);
}

int main(int count, char **arguments) {
  if (count != 5 || atoi(arguments[3]) < 1 || atoi(arguments[4]) < 1)
    return fprintf(stderr, "usage: classify MODEL LIBRARY HEIGHT WIDTH < IMAGE\n"), 2;
  const int64_t shape[] = {1, 3, atoi(arguments[3]), atoi(arguments[4])};
  std::vector<float> image(shape[1] * shape[2] * shape[3]);
  if (fread(image.data(), sizeof(float), image.size(), stdin) != image.size() || getchar() != EOF)
    return fprintf(stderr, "expected 3x%sx%s numbers of float32\n", arguments[3], arguments[4]), 2;

  OrtEnv *env;
  OrtSessionOptions *options;
  OrtSession *session;
  check(ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "classify", &env));
  check(ort->CreateSessionOptions(&options));
  check(ort->RegisterCustomOpsLibrary_V2(options, arguments[2]));  // before the session opens the file
  check(ort->CreateSession(env, arguments[1], options, &session));

  OrtMemoryInfo *memory;
  OrtValue *input, *output = nullptr;
  check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));
  check(ort->CreateTensorWithDataAsOrtValue(memory, image.data(), image.size() * sizeof(float), shape, 4,
                                            ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, &input));
  const char *const input_names[] = {"images"}, *const output_names[] = {"output"};
  check(ort->Run(session, nullptr, input_names, &input, 1, output_names, 1, &output));

  float *scores;
  size_t classes;
  OrtTensorTypeAndShapeInfo *info;
  check(ort->GetTensorMutableData(output, (void **)&scores));
  check(ort->GetTensorTypeAndShape(output, &info));
  check(ort->GetTensorShapeElementCount(info, &classes));
  for (size_t i = 0; i < classes; i++) printf("%.9g\n", scores[i]);
  ort->ReleaseTensorTypeAndShapeInfo(info);
  ort->ReleaseValue(output);
  ort->ReleaseValue(input);
  ort->ReleaseMemoryInfo(memory);
  ort->ReleaseSession(session);
  ort->ReleaseSessionOptions(options);
  ort->ReleaseEnv(env);
}
