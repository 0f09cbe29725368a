/* Reads the messages of a connection, and writes them as records: a tag, the length of the data in four bytes, little
   endian, and the data. */

#include <string.h>

#include "llhttp.h"

struct out {
  uint8_t* bytes;
  size_t room;
  size_t length;
  int is_head;
};

static int put(llhttp_t* parser, uint8_t tag, const char* data, size_t length) {
  struct out* out = parser->data;
  if (out->room - out->length < length + 5) return HPE_USER;
  uint8_t* to = out->bytes + out->length;
  to[0] = tag;
  to[1] = length;
  to[2] = length >> 8;
  to[3] = length >> 16;
  to[4] = length >> 24;
  memcpy(to + 5, data, length);
  out->length += length + 5;
  return 0;
}

static int begin(llhttp_t* parser) { return put(parser, '<', "", 0); }
static int method(llhttp_t* parser, const char* data, size_t length) { return put(parser, 'm', data, length); }
static int target(llhttp_t* parser, const char* data, size_t length) { return put(parser, 't', data, length); }
static int name(llhttp_t* parser, const char* data, size_t length) { return put(parser, 'n', data, length); }
static int value(llhttp_t* parser, const char* data, size_t length) { return put(parser, 'v', data, length); }
static int value_end(llhttp_t* parser) { return put(parser, 'f', "", 0); }
static int body(llhttp_t* parser, const char* data, size_t length) { return put(parser, 'b', data, length); }

static int head_end(llhttp_t* parser) {
  struct out* out = parser->data;
  char head[4] = {parser->http_major, parser->http_minor, parser->status_code & 255, parser->status_code >> 8};
  int error = put(parser, 'h', head, sizeof head);
  return error != 0 ? error : out->is_head;
}

static int end(llhttp_t* parser) {
  char keeps_alive = llhttp_should_keep_alive(parser);
  return put(parser, '>', &keeps_alive, 1);
}

/* Returns the length of the records. `room` has space for all records of this input. */
size_t read_messages(const uint8_t* input, size_t length, int is_response, int is_head, uint8_t* bytes, size_t room) {
  llhttp_settings_t settings;
  llhttp_settings_init(&settings);
  settings.on_message_begin = begin;
  settings.on_method = method;
  settings.on_url = target;
  settings.on_header_field = name;
  settings.on_header_value = value;
  settings.on_header_value_complete = value_end;
  settings.on_headers_complete = head_end;
  settings.on_body = body;
  settings.on_message_complete = end;
  struct out out = {bytes, room, 0, is_head};
  llhttp_t parser;
  llhttp_init(&parser, is_response ? HTTP_RESPONSE : HTTP_REQUEST, &settings);
  parser.data = &out;
  llhttp_errno_t error = llhttp_execute(&parser, (const char*) input, length);
  if (error == HPE_OK) error = llhttp_finish(&parser);
  const char* reason = llhttp_errno_name(error);
  put(&parser, 'x', reason, strlen(reason));
  return out.length;
}
