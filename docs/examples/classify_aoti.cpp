// Runs a file of `vilonghorn export --to aoti` without Python: reads one image of float32 numbers (channels, height,
// width), normalised as in training, from standard input, and prints its scores.
//
//   g++ -std=c++20 classify_aoti.cpp -I TORCH/include -L TORCH/lib -ltorch -ltorch_cpu -lc10 -Wl,-rpath,TORCH/lib -o
//   classify
//   ./classify vilonghorn_tiny.aoti.pt2 224 224 < image.f32
#include <ATen/ops/from_blob.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>

int main(int count, char **arguments) try {
  if (count != 4 || atoi(arguments[2]) < 1 || atoi(arguments[3]) < 1)
    return fprintf(stderr, "usage: classify MODEL HEIGHT WIDTH < IMAGE\n"), 2;
  const int64_t height = atoi(arguments[2]), width = atoi(arguments[3]);
  std::vector<float> image(3 * height * width);
  if (fread(image.data(), sizeof(float), image.size(), stdin) != image.size() || getchar() != EOF)
    return fprintf(stderr, "expected 3x%sx%s numbers of float32\n", arguments[2], arguments[3]), 2;

  torch::inductor::AOTIModelPackageLoader model(arguments[1]);
  const at::Tensor scores = model.run({at::from_blob(image.data(), {1, 3, height, width})})[0];
  for (int64_t i = 0; i < scores.numel(); i++) printf("%.9g\n", scores.const_data_ptr<float>()[i]);
} catch (const std::exception &error) { return fprintf(stderr, "%s\n", error.what()), 1; }
