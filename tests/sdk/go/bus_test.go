// Package sdk drives the official Go SDK, unmodified, against the bus of this run.
package sdk

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus/admin"
	"golang.org/x/net/websocket"
)

const (
	soon = 300 * time.Millisecond
	long = 20 * time.Second
)

var (
	overTLS  = os.Getenv("POSTBUS_TLS")
	inClear  = os.Getenv("POSTBUS_EMULATOR")
	host     = os.Getenv("POSTBUS_HOST")
	once     = azservicebus.RetryOptions{MaxRetries: -1}
	patient  = azservicebus.RetryOptions{MaxRetries: 50, RetryDelay: 200 * time.Millisecond, MaxRetryDelay: time.Second}
	dead     = &azservicebus.ReceiverOptions{SubQueue: azservicebus.SubQueueDeadLetter}
	deleting = &azservicebus.ReceiverOptions{ReceiveMode: azservicebus.ReceiveModeReceiveAndDelete}
)

func keyed(rule, key string) string {
	return "Endpoint=sb://" + host + ";SharedAccessKeyName=" + rule + ";SharedAccessKey=" + key
}

func within(t *testing.T, limit time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

func must[T any](value T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		ok(t, err)
		return value
	}
}

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func equal[T comparable](t *testing.T, got, wanted T) {
	t.Helper()
	if got != wanted {
		t.Fatalf("got %v, wanted %v", got, wanted)
	}
}

// dial opens a WebSocket, which the SDK leaves to its users.
func dial(ctx context.Context, args azservicebus.NewWebSocketConnArgs) (net.Conn, error) {
	config, err := websocket.NewConfig(args.Host, "http://localhost")
	if err != nil {
		return nil, err
	}
	config.Protocol = []string{"amqp"}
	conn, err := config.DialContext(ctx)
	if err != nil {
		return nil, err
	}
	conn.PayloadType = websocket.BinaryFrame
	return conn, nil
}

// connect returns a client over the transport of this run.
func connect(t *testing.T, connectionString string, retries azservicebus.RetryOptions) *azservicebus.Client {
	t.Helper()
	options := &azservicebus.ClientOptions{RetryOptions: retries}
	if os.Getenv("POSTBUS_TRANSPORT") == "websocket" {
		options.NewWebSocketConn = dial
	}
	client := must(azservicebus.NewClientFromConnectionString(connectionString, options))(t)
	t.Cleanup(func() { _ = client.Close(context.Background()) })
	return client
}

func administer(t *testing.T, connectionString string) *admin.Client {
	t.Helper()
	return must(admin.NewClientFromConnectionString(connectionString, nil))(t)
}

func post(t *testing.T, url string, body any) {
	t.Helper()
	data := must(json.Marshal(body))(t)
	request := must(http.NewRequest(http.MethodPost, url, bytes.NewReader(data)))(t)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+os.Getenv("POSTBUS_CONTROL_TOKEN"))
	answer := must(http.DefaultClient.Do(request))(t)
	defer answer.Body.Close()
	if text := must(io.ReadAll(answer.Body))(t); answer.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s", url, text)
	}
}

// keep asks the keeper of the bus: "restart?how=kill".
func keep(t *testing.T, request string) {
	t.Helper()
	post(t, os.Getenv("POSTBUS_KEEPER")+"/"+request, nil)
}

// advance lets time pass for messages, at once.
func advance(t *testing.T, duration string) {
	t.Helper()
	post(t, os.Getenv("POSTBUS_CONTROL")+"/v1/clock/advance", map[string]string{"duration": duration})
}

func text(body string) *azservicebus.Message {
	return &azservicebus.Message{Body: []byte(body)}
}

func inSession(id, body string) *azservicebus.Message {
	return &azservicebus.Message{Body: []byte(body), SessionID: to.Ptr(id)}
}

func send(t *testing.T, client *azservicebus.Client, target string, messages ...*azservicebus.Message) {
	t.Helper()
	sender := must(client.NewSender(target, nil))(t)
	for _, each := range messages {
		ok(t, sender.SendMessage(within(t, long), each, nil))
	}
	ok(t, sender.Close(within(t, long)))
}

type source interface {
	ReceiveMessages(context.Context, int, *azservicebus.ReceiveMessagesOptions) ([]*azservicebus.ReceivedMessage, error)
}

// receive returns exactly so many messages; one receive may return earlier with fewer.
func receive(t *testing.T, from source, count int) []*azservicebus.ReceivedMessage {
	t.Helper()
	var found []*azservicebus.ReceivedMessage
	for len(found) < count {
		found = append(found, must(from.ReceiveMessages(within(t, long), count-len(found), nil))(t)...)
	}
	return found
}

func nothing(t *testing.T, from source) {
	t.Helper()
	got, err := from.ReceiveMessages(within(t, soon), 1, nil)
	if err == nil {
		t.Fatalf("got %q", got[0].Body)
	}
}

func bodies(messages []*azservicebus.ReceivedMessage) string {
	all := ""
	for _, each := range messages {
		all += string(each.Body) + " "
	}
	return strings.TrimSpace(all)
}
