/* The part of onnxruntime's C API that operators.cpp and examples/classify.cpp use, declared anew: its packages
 * for Python have no headers. Names, types and the places of the functions in OrtApi are those of API version 17
 * (onnxruntime 1.17); later versions only append. The header of the same name of any later onnxruntime can take the
 * place of this one.
 */
#ifndef VILONGHORN_ONNXRUNTIME_C_API_H
#define VILONGHORN_ONNXRUNTIME_C_API_H
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
enum { ORT_API_VERSION = 17 };
#ifdef _WIN32
#define ORT_API_CALL __stdcall
typedef wchar_t ORTCHAR_T;
#else
#define ORT_API_CALL
typedef char ORTCHAR_T;
#endif

typedef enum { ORT_FAIL = 1, ORT_INVALID_ARGUMENT = 2 } OrtErrorCode;
typedef enum { ORT_LOGGING_LEVEL_WARNING = 2 } OrtLoggingLevel;
typedef enum {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 = 3,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7
} ONNXTensorElementDataType;
typedef enum { OrtDeviceAllocator = 0, OrtArenaAllocator = 1 } OrtAllocatorType;
typedef enum { OrtMemTypeDefault = 0 } OrtMemType;
typedef enum { INPUT_OUTPUT_REQUIRED = 0, INPUT_OUTPUT_OPTIONAL = 1 } OrtCustomOpInputOutputCharacteristic;

typedef struct OrtEnv OrtEnv;
typedef struct OrtStatus OrtStatus;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtSession OrtSession;
typedef struct OrtValue OrtValue;
typedef struct OrtRunOptions OrtRunOptions;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtKernelInfo OrtKernelInfo;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtCustomOp OrtCustomOp;
typedef OrtStatus *OrtStatusPtr;

/* Members that are not used here are void pointers, named by the first of their places. */
#define ORT_API2_STATUS(name, ...) OrtStatus *(ORT_API_CALL * name)(__VA_ARGS__)
typedef struct OrtApi {
  ORT_API2_STATUS(CreateStatus, OrtErrorCode, const char *message);
  void *place1;
  const char *(ORT_API_CALL *GetErrorMessage)(const OrtStatus *);
  ORT_API2_STATUS(CreateEnv, OrtLoggingLevel, const char *name, OrtEnv **);
  void *place4[3];
  ORT_API2_STATUS(CreateSession, const OrtEnv *, const ORTCHAR_T *path, const OrtSessionOptions *, OrtSession **);
  void *place8;
  ORT_API2_STATUS(Run, OrtSession *, const OrtRunOptions *, const char *const *input_names,
                  const OrtValue *const *inputs, size_t num_inputs, const char *const *output_names, size_t num_outputs,
                  OrtValue **outputs);
  ORT_API2_STATUS(CreateSessionOptions, OrtSessionOptions **);
  void *place11[15];
  ORT_API2_STATUS(CreateCustomOpDomain, const char *name, OrtCustomOpDomain **);
  ORT_API2_STATUS(CustomOpDomain_Add, OrtCustomOpDomain *, const OrtCustomOp *);
  ORT_API2_STATUS(AddCustomOpDomain, OrtSessionOptions *, OrtCustomOpDomain *);
  void *place29[20];
  ORT_API2_STATUS(CreateTensorWithDataAsOrtValue, const OrtMemoryInfo *, void *data, size_t bytes, const int64_t *shape,
                  size_t rank, ONNXTensorElementDataType, OrtValue **);
  void *place50;
  ORT_API2_STATUS(GetTensorMutableData, OrtValue *, void **data);
  void *place52[9];
  ORT_API2_STATUS(GetDimensionsCount, const OrtTensorTypeAndShapeInfo *, size_t *rank);
  ORT_API2_STATUS(GetDimensions, const OrtTensorTypeAndShapeInfo *, int64_t *shape, size_t rank);
  void *place63;
  ORT_API2_STATUS(GetTensorShapeElementCount, const OrtTensorTypeAndShapeInfo *, size_t *count);
  ORT_API2_STATUS(GetTensorTypeAndShape, const OrtValue *, OrtTensorTypeAndShapeInfo **);
  void *place66[3];
  ORT_API2_STATUS(CreateCpuMemoryInfo, OrtAllocatorType, OrtMemType, OrtMemoryInfo **);
  void *place70[15];
  ORT_API2_STATUS(KernelInfoGetAttribute_float, const OrtKernelInfo *, const char *name, float *);
  ORT_API2_STATUS(KernelInfoGetAttribute_int64, const OrtKernelInfo *, const char *name, int64_t *);
  ORT_API2_STATUS(KernelInfoGetAttribute_string, const OrtKernelInfo *, const char *name, char *, size_t *size);
  void *place88[2];
  ORT_API2_STATUS(KernelContext_GetInput, const OrtKernelContext *, size_t index, const OrtValue **);
  ORT_API2_STATUS(KernelContext_GetOutput, OrtKernelContext *, size_t index, const int64_t *shape, size_t rank,
                  OrtValue **);
  void(ORT_API_CALL *ReleaseEnv)(OrtEnv *);
  void(ORT_API_CALL *ReleaseStatus)(OrtStatus *);
  void(ORT_API_CALL *ReleaseMemoryInfo)(OrtMemoryInfo *);
  void(ORT_API_CALL *ReleaseSession)(OrtSession *);
  void(ORT_API_CALL *ReleaseValue)(OrtValue *);
  void *place97[2];
  void(ORT_API_CALL *ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo *);
  void(ORT_API_CALL *ReleaseSessionOptions)(OrtSessionOptions *);
  void *place101[62];
  ORT_API2_STATUS(KernelInfoGetAttributeArray_int64, const OrtKernelInfo *, const char *name, int64_t *, size_t *count);
  void *place164[64];
  ORT_API2_STATUS(RegisterCustomOpsLibrary_V2, OrtSessionOptions *, const ORTCHAR_T *path);
  void *place229[20];
  ORT_API2_STATUS(KernelInfoGetConstantInput_tensor, const OrtKernelInfo *, size_t index, int *is_constant,
                  const OrtValue **);
  void *place250[24];
  ORT_API2_STATUS(KernelContext_ParallelFor, const OrtKernelContext *, void (*run)(void *data, size_t index),
                  size_t total, size_t batches, void *data);
} OrtApi;

typedef struct OrtApiBase {
  const OrtApi *(ORT_API_CALL *GetApi)(uint32_t version); /* null if this onnxruntime is older */
  const char *(ORT_API_CALL *GetVersionString)(void);
} OrtApiBase;
const OrtApiBase *ORT_API_CALL OrtGetApiBase(void);

struct OrtCustomOp {
  uint32_t version; /* ORT_API_VERSION */
  void *place0;
  const char *(ORT_API_CALL *GetName)(const OrtCustomOp *);
  const char *(ORT_API_CALL *GetExecutionProviderType)(const OrtCustomOp *);
  ONNXTensorElementDataType(ORT_API_CALL *GetInputType)(const OrtCustomOp *, size_t index);
  size_t(ORT_API_CALL *GetInputTypeCount)(const OrtCustomOp *);
  ONNXTensorElementDataType(ORT_API_CALL *GetOutputType)(const OrtCustomOp *, size_t index);
  size_t(ORT_API_CALL *GetOutputTypeCount)(const OrtCustomOp *);
  void *place7;
  void(ORT_API_CALL *KernelDestroy)(void *kernel);
  OrtCustomOpInputOutputCharacteristic(ORT_API_CALL *GetInputCharacteristic)(const OrtCustomOp *, size_t index);
  OrtCustomOpInputOutputCharacteristic(ORT_API_CALL *GetOutputCharacteristic)(const OrtCustomOp *, size_t index);
  OrtMemType(ORT_API_CALL *GetInputMemoryType)(const OrtCustomOp *, size_t index);
  void *place12[4];
  OrtStatusPtr(ORT_API_CALL *CreateKernelV2)(const OrtCustomOp *, const OrtApi *, const OrtKernelInfo *, void **kernel);
  OrtStatusPtr(ORT_API_CALL *KernelComputeV2)(void *kernel, OrtKernelContext *);
  void *place18;
  int(ORT_API_CALL *GetStartVersion)(const OrtCustomOp *);
  int(ORT_API_CALL *GetEndVersion)(const OrtCustomOp *);
};
#ifdef __cplusplus
}
#endif
#endif
