package sdk

import (
	"crypto/tls"
	"crypto/x509"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/to"
	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus/admin"
)

// scaler returns the client of KEDA's scaler for Azure Service Bus: an HTTP client of its own, which
// trusts the authorities in /custom/ca and waits three seconds. The connection string is that of a
// Secret of the operator, with the entity in it and without a port.
func scaler(t *testing.T, connectionString string, roots *x509.CertPool) *admin.Client {
	t.Helper()
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}
	client := &http.Client{Timeout: 3 * time.Second, Transport: transport}
	options := &admin.ClientOptions{ClientOptions: policy.ClientOptions{
		Transport: client,
		Retry:     policy.RetryOptions{MaxRetries: -1},
	}}
	return must(admin.NewClientFromConnectionString(connectionString, options))(t)
}

func authorities(t *testing.T) *x509.CertPool {
	t.Helper()
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(must(os.ReadFile(os.Getenv("POSTBUS_CA_FILE")))(t)) {
		t.Fatal("no certificate")
	}
	return pool
}

// scaledEntities makes a queue, a topic and a subscription, each with a rule for the scaler.
func scaledEntities(t *testing.T) {
	t.Helper()
	client := administer(t, overTLS)
	rules := []admin.AuthorizationRule{{
		AccessRights: []admin.AccessRight{
			admin.AccessRightManage, admin.AccessRightListen, admin.AccessRightSend,
		},
		KeyName:      to.Ptr("scaler"),
		PrimaryKey:   to.Ptr(strings.Repeat("sc4ler=", 6)),
		SecondaryKey: to.Ptr(strings.Repeat("unused=", 6)),
	}}
	must(client.CreateQueue(within(t, long), "scaled", &admin.CreateQueueOptions{
		Properties: &admin.QueueProperties{AuthorizationRules: rules},
	}))(t)
	must(client.CreateTopic(within(t, long), "scaled-topic", &admin.CreateTopicOptions{
		Properties: &admin.TopicProperties{AuthorizationRules: rules},
	}))(t)
	must(client.CreateSubscription(within(t, long), "scaled-topic", "all", nil))(t)
	t.Cleanup(func() {
		must(client.DeleteQueue(within(t, long), "scaled", nil))(t)
		must(client.DeleteTopic(within(t, long), "scaled-topic", nil))(t)
	})
}

func TestAnAutoscalerCountsWithTheKeyOfOneEntity(t *testing.T) {
	scaledEntities(t)
	messaging := connect(t, overTLS, once)
	send(t, messaging, "scaled", text("1"), text("2"))
	send(t, messaging, "scaled-topic", text("3"))
	ofQueue := scaler(t, os.Getenv("POSTBUS_SCALER_OF_QUEUE"), authorities(t))
	queue := must(ofQueue.GetQueueRuntimeProperties(within(t, long), "scaled", nil))(t)
	equal(t, queue.ActiveMessageCount, 2)
	ofTopic := scaler(t, os.Getenv("POSTBUS_SCALER_OF_TOPIC"), authorities(t))
	subscription := must(ofTopic.GetSubscriptionRuntimeProperties(within(t, long), "scaled-topic", "all", nil))(t)
	equal(t, subscription.ActiveMessageCount, 1)

	// What is received and not yet settled counts: receivers are not ended while they work.
	receiver := must(messaging.NewReceiverForQueue("scaled", nil))(t)
	receive(t, receiver, 2)
	queue = must(ofQueue.GetQueueRuntimeProperties(within(t, long), "scaled", nil))(t)
	equal(t, queue.ActiveMessageCount, 2)
	ok(t, receiver.Close(within(t, long)))
}

func TestAnAutoscalerIsRefusedWhatItsKeyDoesNotOpen(t *testing.T) {
	scaledEntities(t)
	client := scaler(t, os.Getenv("POSTBUS_SCALER_OF_QUEUE"), authorities(t))
	_, err := client.GetQueueRuntimeProperties(within(t, long), "plain-1", nil)
	wantStatus(t, err, http.StatusUnauthorized)
	// A regular expression of queues, which KEDA matches against all of them.
	_, err = client.NewListQueuesRuntimePropertiesPager(nil).NextPage(within(t, long))
	wantStatus(t, err, http.StatusUnauthorized)
	listener := scaler(t, keyed("listener", "l1sten/+l1sten/+l1sten/+"), authorities(t))
	_, err = listener.GetQueueRuntimeProperties(within(t, long), "scaled", nil)
	wantStatus(t, err, http.StatusUnauthorized)
	unknown := scaler(t, os.Getenv("POSTBUS_SCALER_OF_QUEUE"), x509.NewCertPool())
	if _, err = unknown.GetQueueRuntimeProperties(within(t, long), "scaled", nil); err == nil {
		t.Fatal("a bus of an unknown authority was believed")
	}
}

func TestMessagesOfAQueueThatRefusesReceiversCountAsActive(t *testing.T) {
	all := administer(t, overTLS)
	must(all.CreateQueue(within(t, long), "switched-off", nil))(t)
	send(t, connect(t, overTLS, once), "switched-off", text("1"))
	for _, status := range []admin.EntityStatus{admin.EntityStatusReceiveDisabled, admin.EntityStatusDisabled} {
		changed := must(all.GetQueue(within(t, long), "switched-off", nil))(t).QueueProperties
		changed.Status = to.Ptr(status)
		must(all.UpdateQueue(within(t, long), "switched-off", changed, nil))(t)
		counted := must(all.GetQueueRuntimeProperties(within(t, long), "switched-off", nil))(t)
		equal(t, counted.ActiveMessageCount, 1)
	}
	must(all.DeleteQueue(within(t, long), "switched-off", nil))(t)
}
