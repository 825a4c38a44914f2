// A PJRT plugin that passes each call on to another plugin, and on the way renames the platform, withholds functions,
// refuses programs and limits memory. Structs are those of pjrt_c_api.h, as far as they are used.

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

enum Name {
#define F(name) name,
#include "functions.inc"
#undef F
  kCount
};
const char* const kNames[] = {
#define F(name) #name,
#include "functions.inc"
#undef F
};
constexpr int kInvalidArgument = 3, kResourceExhausted = 8, kUnimplemented = 12;  // absl::StatusCode

using Function = void* (*)(void*);  // takes a struct of arguments, returns a PJRT_Error* or null

struct Api {
  size_t struct_size;
  void* extensions;
  size_t version[3];
  Function functions[kCount];
};

struct Head {
  size_t struct_size;
  void* extensions = nullptr;
};

// Arguments of most functions: an object, and for getters a value, whose size follows if it is a text or an array.
template <typename T>
struct Get : Head {
  void* object;
  T value{};
  size_t size = 0;
};

struct State {
  const Api* real;
  Function functions[kCount];  // the real ones, or what stands in for them
  std::string platform, kind, version = "loopback (OpenXLA's CPU plugin)";
  const char* (*refuses)(const char* code, size_t size);
  std::atomic<bool> lacks[kCount] = {};
  std::atomic<int64_t> calls[kCount] = {};
  int64_t memory_bytes = INT64_MAX, pinned_host = 1, donation = 1;

  std::mutex mutex;  // of what follows
  struct Buffer { void* device; int64_t bytes; };
  std::map<void*, Buffer> buffers;         // in memory of devices
  std::map<void*, int64_t> running, peak;  // bytes by device; of programs while they are started
  struct Program { int64_t bytes; size_t num_results; };
  std::map<void*, Program> programs;  // bytes: of results and temporary buffers
};

State& state = *new State;  // never destroyed: the last buffers are destroyed after static objects

void* Real(Name name, void* args) { return state.real->functions[name](args); }

void Drop(Name name, void* object) {
  Get<char> args{{sizeof(Head) + sizeof(void*)}, object};
  if (object) Real(name, &args);
}

// Returns what the plugin answers, zeros if it answers an error.
template <typename T>
Get<T> Ask(Name name, void* object) {
  Get<T> args{{sizeof(args)}, object};
  void* error = Real(name, &args);
  if (!error) return args;
  Drop(Error_Destroy, error);
  return {{sizeof(args)}, object};
}

// Returns an error of the plugin's own making, so that its functions about errors take it: that of a failed event.
void* Refuse(int code, const std::string& message) {
  struct : Head { void* event; int code; const char* text; size_t size; } args{};
  args.struct_size = sizeof(args);
  Real(Event_Create, &args);
  args.code = code, args.text = message.data(), args.size = message.size();
  Real(Event_Set, &args);
  Get<char> failed{{sizeof(Head) + sizeof(void*)}, args.event};
  void* error = Real(Event_Error, &failed);
  Drop(Event_Destroy, args.event);
  return error;
}

// Returns the bytes that a device's buffers and programs take. Those deleted or donated take none. The state is locked.
int64_t InUse(void* device) {
  int64_t bytes = state.running[device];
  for (const auto& [buffer, held] : state.buffers)
    if (held.device == device && !Ask<bool>(Buffer_IsDeleted, buffer).value) bytes += held.bytes;
  return bytes;
}

// Returns an error if a device has no room for so many bytes. The state is locked.
void* Claim(void* device, int64_t bytes, const char* what) {
  const int64_t used = InUse(device);
  if (bytes > state.memory_bytes - used)
    return Refuse(kResourceExhausted, "Out of memory on " + state.platform + ": " + what + " takes " +
                                          std::to_string(bytes) + " bytes, " + std::to_string(used) + " of " +
                                          std::to_string(state.memory_bytes) + " are in use");
  state.peak[device] = std::max(state.peak[device], used + bytes);
  return nullptr;
}

// Counts a new buffer in its device's memory. If it was not claimed before and there is no room, destroys it and
// returns an error.
void* Count(void*& buffer, bool claimed = false) {
  const auto kind = Ask<const char*>(Memory_Kind, Ask<void*>(Buffer_Memory, buffer).value);
  if (std::string(kind.value, kind.size) != "device") return nullptr;
  void* device = Ask<void*>(Buffer_Device, buffer).value;
  const int64_t bytes = Ask<size_t>(Buffer_OnDeviceSizeInBytes, buffer).value;
  std::lock_guard<std::mutex> lock(state.mutex);
  if (void* error = claimed ? nullptr : Claim(device, bytes, "an array")) {
    Drop(Buffer_Destroy, std::exchange(buffer, nullptr));
    return error;
  }
  state.buffers[buffer] = {device, bytes};
  return nullptr;
}

template <Name name>
void* Destroy(void* args) {
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    state.buffers.erase(static_cast<Get<char>*>(args)->object);
    state.programs.erase(static_cast<Get<char>*>(args)->object);
  }
  return Real(name, args);
}

void* FromHost(void* pointer) {
  struct Args : Head {
    void *client, *data;
    int type;
    void* dims;
    size_t num_dims;
    void* strides;
    size_t num_strides;
    int semantics;
    void *device, *memory, *layout, *done, *buffer;
  }* args = static_cast<Args*>(pointer);
  args->semantics = 0;  // kImmutableOnlyDuringCall: the device gets a copy, which it can donate
  if (void* error = Real(Client_BufferFromHostBuffer, args)) return error;
  void* error = Count(args->buffer);
  if (error) Drop(Event_Destroy, args->done);
  return error;
}

template <Name name>
void* CopyTo(void* pointer) {
  struct Args : Head { void *buffer, *to, *copy; }* args = static_cast<Args*>(pointer);
  void* error = Real(name, args);
  return error ? error : Count(args->copy);
}

void* Compiled(void* pointer) {
  struct Program : Head { const char* code; size_t size; };
  const auto program = static_cast<Get<Program*>*>(pointer)->value;
  const char* refused = state.refuses(program->code, program->size);
  return refused ? Refuse(kUnimplemented, refused) : Real(Client_Compile, pointer);
}

State::Program Measured(void* loaded) {
  std::lock_guard<std::mutex> lock(state.mutex);
  auto [found, is_new] = state.programs.try_emplace(loaded);
  if (is_new) {
    struct Sizes { int64_t argument, output, alias, temporary, rest[12]; };  // after that of the code
    void* program = Ask<void*>(LoadedExecutable_GetExecutable, loaded).value;
    struct : Head { void* program; int64_t code; Sizes sizes; } args{};
    args.struct_size = sizeof(args), args.program = program;
    if (void* error = Real(Executable_GetCompiledMemoryStats, &args)) Drop(Error_Destroy, error);
    const Sizes& sizes = args.sizes;
    found->second.bytes = sizes.output + sizes.temporary - (state.donation ? sizes.alias : 0);
    found->second.num_results = Ask<size_t>(Executable_NumOutputs, program).value;
    Drop(Executable_Destroy, program);
  }
  return found->second;
}

void* Run(void* pointer) {
  struct Options : Head {
    void* callbacks[4];
    int launch;
    const int64_t* kept;
    size_t num_kept;
  };
  struct Args : Head {
    void* program;
    Options* options;
    void* arguments;
    size_t num_devices, num_arguments;
    void*** results;
    void *done, *device;
  }* args = static_cast<Args*>(pointer);
  const auto [bytes, num_results] = Measured(args->program);
  std::vector<void*> devices{args->device};
  if (!args->device) {
    const auto found = Ask<void**>(LoadedExecutable_AddressableDevices, args->program);
    devices.assign(found.value, found.value + found.size);
  }
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    for (void* device : devices)
      if (void* error = Claim(device, bytes, "a program")) return error;
    for (void* device : devices) state.running[device] += bytes;
  }
  std::vector<int64_t> kept(args->num_arguments);
  for (size_t i = 0; i < kept.size(); ++i) kept[i] = i;
  const Options given = *args->options;
  if (!state.donation) args->options->kept = kept.data(), args->options->num_kept = kept.size();
  void* error = Real(LoadedExecutable_Execute, args);
  args->options->kept = given.kept, args->options->num_kept = given.num_kept;
  {
    std::lock_guard<std::mutex> lock(state.mutex);
    for (void* device : devices) state.running[device] -= bytes;
  }
  for (size_t row = 0; row < args->num_devices && !error; ++row)
    for (size_t i = 0; i < num_results; ++i) Count(args->results[row][i], true);
  return error;
}

void* CreateClient(void* pointer) {
  struct Option : Head { const char* name; size_t name_size; int type; int64_t value; size_t value_size; };
  struct Args : Head { Option* options; size_t num_options; void *callbacks[4], *client; };
  const auto args = static_cast<Args*>(pointer);
  const std::map<std::string, int64_t*> known{{"memory_bytes", &state.memory_bytes},
                                              {"pinned_host", &state.pinned_host},
                                              {"donation", &state.donation}};
  for (size_t i = 0; i < args->num_options; ++i) {
    const std::string name(args->options[i].name, args->options[i].name_size);
    const auto found = known.find(name);
    if (found == known.end() || args->options[i].type != 1)
      return Refuse(kInvalidArgument, "the loopback has no option " + name + " that is a number");
    *found->second = args->options[i].value;
  }
  args->num_options = 0;
  return Real(Client_Create, args);
}

template <std::string State::* text>
void* Text(void* args) {
  static_cast<Get<const char*>*>(args)->value = (state.*text).data();
  static_cast<Get<const char*>*>(args)->size = (state.*text).size();
  return nullptr;
}

void* Memories(void* args) {
  void* error = Real(Device_AddressableMemories, args);
  if (!error && !state.pinned_host) static_cast<Get<void*>*>(args)->size = 1;  // those on the host follow
  return error;
}

void* IsOnCpu(void* args) {
  static_cast<Get<bool>*>(args)->value = false;  // else jax reads arrays where they are
  return nullptr;
}

void* MemoryStats(void* pointer) {
  struct Value { int64_t value; bool is_set; };
  struct Args : Head { void* device; int64_t in_use; Value peak, allocations, largest, limit, others[6]; };
  const auto args = static_cast<Args*>(pointer);
  std::lock_guard<std::mutex> lock(state.mutex);
  args->in_use = InUse(args->device);
  args->peak = {state.peak[args->device], true};
  args->limit = {state.memory_bytes, true};
  args->allocations.is_set = args->largest.is_set = false;
  for (Value& other : args->others) other.is_set = false;
  return nullptr;
}

template <int name>
void* Entry(void* args) {
  ++state.calls[name];
  if (!state.lacks[name]) return state.functions[name](args);
  return Refuse(kUnimplemented, std::string("PJRT_") + kNames[name] + " is not implemented by the loopback plugin");
}

template <int... names>
Api Table(std::integer_sequence<int, names...>) {
  return {sizeof(Api), nullptr, {}, {Entry<names>...}};
}

Api table = Table(std::make_integer_sequence<int, kCount>());

}  // namespace

extern "C" {

// Opens the plugin that calls are passed on to; returns why it cannot, or null. refuses: returns why a program is
// refused, or null.
const char* loopback_open(const char* library, const char* platform, const char* (*refuses)(const char*, size_t)) {
  void* opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  void* function = opened ? dlsym(opened, "GetPjrtApi") : nullptr;
  if (!function) return dlerror();
  state.real = reinterpret_cast<const Api* (*)()>(function)();
  if (state.real->struct_size < sizeof(Api)) return "its PJRT C API is older than 0.112";
  state.platform = platform, state.kind = "loopback " + state.platform + " (CPU)", state.refuses = refuses;
  Function* own = std::copy_n(state.real->functions, kCount, state.functions) - kCount;
  own[Buffer_CopyToDevice] = CopyTo<Buffer_CopyToDevice>;
  own[Buffer_CopyToMemory] = CopyTo<Buffer_CopyToMemory>;
  own[Buffer_Destroy] = Destroy<Buffer_Destroy>;
  own[Buffer_IsOnCpu] = IsOnCpu;
  own[Client_BufferFromHostBuffer] = FromHost;
  own[Client_Compile] = Compiled;
  own[Client_Create] = CreateClient;
  own[Client_PlatformName] = own[TopologyDescription_PlatformName] = Text<&State::platform>;
  own[Client_PlatformVersion] = own[TopologyDescription_PlatformVersion] = Text<&State::version>;
  own[DeviceDescription_Kind] = Text<&State::kind>;
  own[Device_AddressableMemories] = Memories;
  own[Device_MemoryStats] = MemoryStats;
  own[LoadedExecutable_Destroy] = Destroy<LoadedExecutable_Destroy>;
  own[LoadedExecutable_Execute] = Run;
  std::memcpy(table.version, state.real->version, sizeof(table.version));
  return nullptr;
}

void loopback_withhold(int function, bool lacks) { state.lacks[function] = lacks; }

int64_t loopback_calls(int function) { return state.calls[function]; }

const Api* GetPjrtApi() { return &table; }
}
