// d (+)= a b: a [64, 16] and b [16, N] in shared memory. TA, TB: 1 where the operand is MN-major. An instruction names each of
// its registers, so every width N is written out: N / 2 results, then the operands.
#define RESULTS_8(d, j) FOUR(d, j), FOUR(d, j + 1)
#define RESULTS_16(d, j) RESULTS_8(d, j), RESULTS_8(d, j + 2)
#define RESULTS_64(d, j) RESULTS_16(d, j), RESULTS_16(d, j + 4), RESULTS_16(d, j + 8), RESULTS_16(d, j + 12)
#define NAMES_4 "%0, %1, %2, %3"
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_12 NAMES_8 ", %8, %9, %10, %11"
#define NAMES_32 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_48 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_64 NAMES_48 \
    ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_96 NAMES_64 \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
    ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NAMES_128 NAMES_96 \
    ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
    ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_SHARED(N, NAMES, A, B, ADDS, MAJOR_A, MAJOR_B, ...)                                                      \
    template <int TA, int TB>                                                                                          \
    __device__ __forceinline__ void wgmma_shared(float (&d)[N / 8][4], u64 a, u64 b, bool adds) {                      \
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #ADDS ", 0; "                                                  \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" NAMES "}, %" #A ", %" #B             \
                     ", p, 1, 1, %" #MAJOR_A ", %" #MAJOR_B "; }"                                                      \
                     : __VA_ARGS__                                                                                     \
                     : "l"(a), "l"(b), "r"((int)adds), "n"(TA), "n"(TB));                                              \
    }
WGMMA_SHARED(8, NAMES_4, 4, 5, 6, 7, 8, FOUR(d, 0))
WGMMA_SHARED(24, NAMES_12, 12, 13, 14, 15, 16, RESULTS_8(d, 0), FOUR(d, 2))
WGMMA_SHARED(16, NAMES_8, 8, 9, 10, 11, 12, RESULTS_8(d, 0))
WGMMA_SHARED(32, NAMES_16, 16, 17, 18, 19, 20, RESULTS_16(d, 0))
WGMMA_SHARED(64, NAMES_32, 32, 33, 34, 35, 36, RESULTS_16(d, 0), RESULTS_16(d, 4))
WGMMA_SHARED(96, NAMES_48, 48, 49, 50, 51, 52, RESULTS_16(d, 0), RESULTS_16(d, 4), RESULTS_16(d, 8))
WGMMA_SHARED(128, NAMES_64, 64, 65, 66, 67, 68, RESULTS_64(d, 0))
WGMMA_SHARED(192, NAMES_96, 96, 97, 98, 99, 100, RESULTS_64(d, 0), RESULTS_16(d, 16), RESULTS_16(d, 20))
WGMMA_SHARED(256, NAMES_128, 128, 129, 130, 131, 132, RESULTS_64(d, 0), RESULTS_64(d, 16))
