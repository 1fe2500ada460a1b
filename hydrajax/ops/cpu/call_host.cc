// A call of the host's Python inside a program on a CPU, by the address of a C function and a number for it.

#include <cstdint>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

// Two halves of an address and a number; a program that was read from the disk is called with other ones.
using Entry = ffi::Buffer<ffi::U32, 1>;
using Host = int32_t (*)(int32_t number, int32_t count, void* const* buffers, const int64_t* bytes);

ffi::Error CallHost(Entry entry, ffi::RemainingArgs inputs, ffi::RemainingRets outputs) {
  if (entry.element_count() != 3) return ffi::Error::InvalidArgument("hydrajax_call_host: the entry is not as declared");
  std::vector<void*> buffers;
  std::vector<int64_t> bytes;
  for (size_t i = 0; i < inputs.size(); ++i) {
    auto input = inputs.get<ffi::AnyBuffer>(i);
    if (!input) return input.error();
    buffers.push_back(input->untyped_data());
    bytes.push_back(input->size_bytes());
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto output = outputs.get<ffi::AnyBuffer>(i);
    if (!output) return output.error();
    buffers.push_back((*output)->untyped_data());
    bytes.push_back((*output)->size_bytes());
  }
  const uint32_t* words = entry.typed_data();
  auto host = reinterpret_cast<Host>(static_cast<uintptr_t>(words[0] | static_cast<uint64_t>(words[1]) << 32));
  const int32_t failed = host(static_cast<int32_t>(words[2]), static_cast<int32_t>(buffers.size()), buffers.data(), bytes.data());
  return failed ? ffi::Error::Internal("hydrajax_call_host: the host's function has failed") : ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(hydrajax_call_host, CallHost,
                              ffi::Ffi::Bind().Arg<Entry>().RemainingArgs().RemainingRets());
