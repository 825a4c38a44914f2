// Memory of zeros that is written when it is first used.

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "calls.h"

namespace ksana {

void Zero(char* out, int64_t size) {
  const int64_t page = sysconf(_SC_PAGESIZE);
  const auto address = reinterpret_cast<int64_t>(out);
  char* first = out + ((address + page - 1) / page * page - address);
  const int64_t whole = out + size > first ? (out + size - first) / page * page : 0;
  if (whole > 0) {
    *first = 1;
    // Pages that are given up read as zeros if the memory is private, which most allocators' is; the byte shows it.
    if (madvise(first, whole, MADV_DONTNEED) == 0 && *static_cast<volatile char*>(first) == 0) {
      std::memset(out, 0, first - out);
      std::memset(first + whole, 0, out + size - first - whole);
      return;
    }
  }
  std::memset(out, 0, size);
}

}  // namespace ksana
